import errno
import fcntl
import json
import os
import pickle
import stat
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import linattn.integrations.transformers  # noqa: F401
from linattn.files import write_tensors
from linattn.models import LanguageModel
from tests.models.causal import every_model, small_model, some_tokens

elu = {"attention": "local+elu"}
FILES = ["config.json", "linattn_classes.py", "model.safetensors"]


@every_model
def test_a_saved_model_comes_back(options, tmp_path):
    model, tokens = small_model(options), some_tokens(2, 20)
    model.save(tmp_path / "new" / "folder")
    random = torch.get_rng_state()
    loaded = LanguageModel.load(tmp_path / "new" / "folder")
    assert torch.equal(torch.get_rng_state(), random)
    assert loaded.config == model.config and not loaded.training
    assert torch.equal(loaded(tokens), model(tokens))


def test_files_are_these_and_dtypes_stay(tmp_path):
    model = small_model(elu).bfloat16()
    model.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == FILES
    assert {parameter.dtype for parameter in LanguageModel.load(tmp_path).parameters()} == {torch.bfloat16}


def test_files_have_the_mode_of_any_new_file(tmp_path):
    """safetensors lets only the owner read its files."""
    (tmp_path / "any").touch()
    small_model(elu).save(tmp_path)
    assert {(tmp_path / name).stat().st_mode for name in FILES} == {(tmp_path / "any").stat().st_mode}


def test_files_are_flushed_through_a_descriptor_that_may_write(tmp_path, monkeypatch):
    """Windows flushes no other file, and no folder."""
    flushed = []

    def fsync(descriptor: int) -> None:
        assert stat.S_ISREG(os.fstat(descriptor).st_mode)
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        flushed.append(descriptor)

    windows = SimpleNamespace(**{**vars(os), "name": "nt", "fsync": fsync})
    monkeypatch.setattr("linattn.files.os", windows)
    small_model(elu).save(tmp_path)
    assert len(flushed) == len(FILES)


def test_tied_weights_are_stored_once(tmp_path):
    small_model(elu).save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "model.embedding.weight" in names and not any("head.weight" in name for name in names)


def test_the_names_of_weights_stay_so_that_old_folders_load(tmp_path):
    small_model({"attention": "local+elu", "depth": 1, "gate": True}).save(tmp_path)
    parts = ["mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.g_proj", "mixer.o_proj", "mixer_norm"]
    parts += ["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj", "feed_forward_norm"]
    expected = {"model.embedding.weight", "model.norm.weight", *(f"model.blocks.0.{part}.weight" for part in parts)}
    assert set(load_file(tmp_path / "model.safetensors")) == expected


@pytest.mark.parametrize("option", ["head_norm", "gated_norm"])
def test_a_folder_from_before_the_epsilon_computes_as_it_did(option, tmp_path):
    model = small_model({"attention": "ssd", option: True, "head_norm_eps": 0.0})
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["language_model"]["head_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).model
    for loaded in (LanguageModel.load(tmp_path), theirs):
        assert loaded.config == model.config
    tokens = some_tokens(2, 20)
    assert torch.equal(LanguageModel.load(tmp_path)(tokens), model(tokens))
    assert small_model({"attention": "ssd", option: True}).config.head_norm_eps > 0


def test_what_other_programs_add_to_the_configuration_does_not_matter(tmp_path):
    small_model(elu).save(tmp_path)
    change(tmp_path, transformers_version="5.23.0", dtype="float64", hidden_size=99)
    assert LanguageModel.load(tmp_path).config.dim == 16


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "config.json is not of a linattn model: its model_type is 'llama'"),
        ({"linattn_version": "99.0"}, "was written by linattn 99.0, but this is .*: a newer one is needed"),
        ({"linattn_version": None}, "no valid linattn_version, but None"),
        ({"language_model": None}, "has no language_model"),
        ({"language_model": {"vocab_size": 3, "width": 3}}, "config.json: unknown configuration 'width'"),
        ({"language_model": {"vocab_size": 3, "dim": -3}}, "config.json: dim must be"),
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path, fields, message):
    small_model(elu).save(tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(tmp_path)


def weights_changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra is not of this model"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight is \(3,\) and must be \(16,\)",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(16, dtype=torch.int32)}),
            "model.norm.weight is torch.int32 and must be torch.float32",
        ),
        (lambda tensors: tensors.clear(), r"is missing; .* is missing, and \d+ more$"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, change, message):
    small_model(elu).save(tmp_path)
    weights_changed(tmp_path, change)
    with pytest.raises(ValueError, match=f"model.safetensors does not fit its configuration: .*{message}"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("length", [0, 7, 500])
def test_a_cut_off_file_is_refused(tmp_path, name, length):
    small_model(elu).save(tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:length])
    with pytest.raises(ValueError, match=f"{name} is corrupt: "):
        LanguageModel.load(tmp_path)


def test_a_pickle_is_never_loaded(tmp_path):
    small_model(elu).save(tmp_path)

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"model.safetensors is corrupt"):
        LanguageModel.load(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    small_model(elu).save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"there is no model in .*: {name} is missing"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize("step", ["models.storage.write_tensors", "files.flush_to_disk"])
def test_a_full_disk_leaves_the_old_model(tmp_path, monkeypatch, step):
    old = small_model(elu)
    old.save(tmp_path)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"linattn.{step}", full)
    with pytest.raises(OSError, match="No space left"):
        small_model(elu, dim=32).save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == FILES
    assert torch.equal(LanguageModel.load(tmp_path).embedding.weight, old.embedding.weight)


def test_what_the_disk_refuses_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match=r"weights could not be written to .*absent"):
        write_tensors({"x": torch.zeros(3)}, tmp_path / "absent" / "weights", {})
