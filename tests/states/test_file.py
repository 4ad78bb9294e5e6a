"""A file of a state gives the same state back, or an error that says why not."""

import importlib
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import linattn
from linattn import LanguageModel, LanguageModelConfig, LinearState, states
from linattn.distributed import tensor_parallel
from linattn.models import storage
from linattn.ops.nested import map_state
from linattn.states import file as state_file
from tests.cli.test_killed import restore, watched
from tests.models.causal import every_kind, small_model, some_tokens
from tests.processes import needs_processes, run_in_another, run_in_group
from tests.states.test_rows import assert_same, tensors

ELU = {"attention": "local+elu"}
NUMBERS = {
    "vocab_size": numpy.int64(7),
    "dim": numpy.int32(8),
    "depth": 1,
    "num_heads": 2,
    "dropout": numpy.float32(0.5),
}


@every_kind
@torch.no_grad()
def test_save_and_load_change_nothing(options, tmp_path):
    model = small_model(options).float()
    state, more, path = model.extend(some_tokens(2, 10))[1], some_tokens(2, 3), tmp_path / "text.state"
    for kept in (
        state,
        states.to(state, dtype=torch.float64),
        *(states.compress(state, x) for x in states.compression.COMPACT),
    ):
        states.save_state(kept, path, model=model, num_tokens=20)
        loaded = states.load_state(path, model=model)
        assert_same(loaded, kept, rtol=0, atol=0)
        assert type(loaded) is type(kept)
    states.save_state(state, path, model=model, num_tokens=20)
    assert_close(
        model.extend(more, states.load_state(path, model=model))[0], model.extend(more, state)[0], rtol=0, atol=0
    )
    described = states.describe_state(path)
    assert (
        described.num_tokens == 20
        and described.rows == 2
        and described.config == json.loads(json.dumps(model.config.to_dict()))
    )


def test_numbers_of_other_packages_are_numbers(tmp_path):
    """A count of numpy, in an option of a model or of a state."""
    model, path = LanguageModel(LanguageModelConfig(**NUMBERS)), tmp_path / "text.state"
    model.save(tmp_path / "model")
    assert LanguageModel.load(tmp_path / "model").config == model.config
    state = model.extend(some_tokens(1, 3) % 7)[1]
    states.save_state(state, path, model=model, num_tokens=numpy.int64(3))
    assert states.describe_state(path).num_tokens == 3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "wrong", [{"num_tokens": -5}, {"notes": {"a": 1}}, {"notes": ["a"]}, {"model": "gpt2"}], ids=str
)
def test_wrong_descriptions_are_refused(wrong, tmp_path):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be"):
        states.save_state(operator_state(), tmp_path / "text.state", **{"model": None} | wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unchecked")
def test_what_has_no_weights_has_no_fingerprint():
    with pytest.raises(ValueError, match="model must be a Module, but is None"):
        states.fingerprint(None)


def operator_state():
    return LinearState(torch.randn(2, 4, 3), torch.randn(2, 4))


@pytest.fixture
def saved(tmp_path):
    model, path = small_model(ELU), tmp_path / "text.state"
    states.save_state(model.extend(some_tokens(1, 9))[1], path, model=model)
    return model, path


def test_a_state_of_an_operator_or_a_module_is_saved_too(tmp_path):
    state, path = operator_state(), tmp_path / "sums.state"
    states.save_state(state, path, model=None)
    assert_same(states.load_state(path, model=None), state, rtol=0, atol=0)
    module = linattn.MultiheadAttention(16, 4, linattn.named_attention("elu", num_heads=4, head_dim=4, causal=True))
    _, state = module.extend(torch.randn(2, 5, 16))
    states.save_state(state, path, model=module)
    assert_same(states.load_state(path, model=module), state, rtol=0, atol=0)
    with pytest.raises(ValueError, match="a state of a MultiheadAttention, but this is an operator, without a model"):
        states.load_state(path, model=None)


def test_others_may_read_the_file_as_any_new_one(saved):
    _, path = saved
    new = path.with_name("new")
    new.touch()
    assert path.stat().st_mode == new.stat().st_mode


def test_a_state_of_another_model_is_refused(saved):
    model, path = saved
    with pytest.raises(ValueError, match=r"another model: .*attention was 'local\+elu' there and is 'elu' here"):
        states.load_state(path, model=small_model({"attention": "elu"}))
    with pytest.raises(ValueError, match="other weights"):
        states.load_state(path, model=small_model(ELU))
    with torch.no_grad():
        model.embedding.weight[3, 2] += 1e-9
    with pytest.raises(ValueError, match="other weights"):
        states.load_state(path, model=model)


def test_random_features_are_part_of_the_fingerprint():
    models = [small_model({"attention": "favor"}) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    assert states.fingerprint(models[0]) == states.fingerprint(models[1])
    buffer = next(iter(models[1].buffers()))
    buffer.mul_(2)
    assert states.fingerprint(models[0]) != states.fingerprint(models[1])


def test_a_file_that_was_altered_or_cut_is_refused(saved):
    """Each byte that is flipped, in a sample of all, and each length."""
    model, path = saved
    whole = path.read_bytes()
    for place in [*range(0, 64), *range(64, len(whole), len(whole) // 97)]:
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]):
            path.write_bytes(content)
            with pytest.raises(ValueError):
                states.load_state(path, model=model)
    path.write_bytes(whole)
    states.load_state(path, model=model)


def test_files_that_are_no_states(saved, tmp_path):
    model, path = saved
    with pytest.raises(FileNotFoundError, match="no state in"):
        states.load_state(tmp_path / "none.state", model=model)
    model.save(tmp_path)
    with pytest.raises(ValueError, match="holds no state"):
        states.load_state(tmp_path / storage.WEIGHTS, model=model)
    with pytest.raises(ValueError, match=r"a state holds tensors and numbers, but the state\.1 is a list"):
        states.save_state((torch.zeros(1), []), path, model=None)


def test_a_later_version_is_refused(saved, monkeypatch):
    model, path = saved
    monkeypatch.setattr(state_file, "__version__", "99.0.0")
    states.save_state(model.extend(some_tokens(1, 9))[1], path, model=model)
    with pytest.raises(ValueError, match=r"linattn 99\.0\.0.*newer"):
        states.load_state(path, model=model)


def test_nothing_is_half_written(saved, monkeypatch):
    model, path = saved
    before = path.read_bytes()

    def fails(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(KeyboardInterrupt):
        states.save_state(model.extend(some_tokens(1, 30))[1], path, model=model)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_kill_at_any_write_loses_nothing(saved):
    """At each instant the disk has the old state or the new one; the next to write needs no cleaning before."""
    model, path = saved
    old, new = path.read_bytes(), map_state(torch.Tensor.detach, model.extend(some_tokens(1, 30))[1])
    with watched(path.parent) as disks:
        states.save_state(new, path, model=model)
    contents = old, path.read_bytes()
    assert len(disks) > 3
    for disk in disks:
        assert disk[path.name] in contents
        restore(path.parent, disk)
        states.load_state(path, model=model)
        states.save_state(new, path, model=model)
        assert_same(states.load_state(path, model=model), new, rtol=0, atol=0)


def load_often(path, model_path, expected):
    """Load until a state comes that is none of those expected, or the file `path` + "end" is there."""
    model, loads = torch.load(model_path, weights_only=False), 0
    while not path.with_name("end").exists():
        state = states.load_state(path, model=model)
        assert any(all(map(torch.equal, tensors(state), tensors(each))) for each in expected), (
            f"another state after {loads} loads"
        )
        loads += 1
        path.with_name("loaded").touch()


@needs_processes
def test_two_processes_read_one_file_while_it_is_replaced(saved):
    model, path = saved
    made = [map_state(torch.Tensor.detach, model.extend(some_tokens(1, n))[1]) for n in (9, 10)]
    torch.save(model, path.with_name("model"))
    states.save_state(made[0], path, model=model)
    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(run_in_another, load_often, path, path.with_name("model"), made) for _ in range(2)]
        while not path.with_name("loaded").exists() and not any(reader.done() for reader in readers):
            states.save_state(made[1], path, model=model)
        for i in range(20):
            states.save_state(made[i % 2], path, model=model)
        path.with_name("end").touch()
        assert [reader.result() for reader in readers] == [0, 0]


def test_threads_may_write_the_same_file(tmp_path):
    made, path = [operator_state() for _ in range(4)], tmp_path / "text.state"
    with ThreadPoolExecutor(len(made)) as pool:
        for _ in range(20):
            list(pool.map(lambda state: states.save_state(state, path, model=None), made))
            loaded = tensors(states.load_state(path, model=None))
            assert any(all(map(torch.equal, loaded, tensors(state))) for state in made)
    assert list(tmp_path.iterdir()) == [path]


def save_with_shared_weights(rank, path):
    model = small_model(ELU)
    state = model.extend(some_tokens(1, 3))[1]
    sharding = tensor_parallel(model, init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"needs all numbers in this process, but .* is a DTensor"):
        states.save_state(state, path, model=model)
    sharding.undo()
    states.save_state(state, path, model=model)


@needs_processes
def test_weights_that_several_processes_share_are_refused(tmp_path):
    run_in_group(1, save_with_shared_weights, tmp_path / "text.state")


def test_weights_without_numbers_are_refused(saved):
    model, path = saved
    state = states.load_state(path, model=model)
    model = model.to("meta")
    for call in (
        lambda: states.fingerprint(model),
        lambda: states.load_state(path, model=model),
        lambda: states.save_state(state, path, model=model),
        lambda: states.PrefixCache(model, folder=path.parent / "cache"),
    ):
        with pytest.raises(ValueError, match=r"the numbers of all tensors, but \S+ is on the meta device"):
            call()


def test_kinds_have_names_of_their_own():
    """A file names the class of each part of a state; of two classes of one name it could not say which."""
    for package in ("linear_attention_transformer", "performer_pytorch", "fast_transformers"):
        importlib.import_module(f"linattn.compat.{package}")
    modules = (
        "linattn.ops.",
        "linattn.attention.",
        "linattn.nn.",
        "linattn.models.",
        "linattn.compat.",
        "linattn.states.",
    )
    kinds = [
        kind for kind in tuple.__subclasses__() if hasattr(kind, "_fields") and kind.__module__.startswith(modules)
    ]
    counts = Counter(kind.__name__ for kind in kinds)
    assert len(counts) > 20 and max(counts.values()) == 1, counts.most_common(3)
