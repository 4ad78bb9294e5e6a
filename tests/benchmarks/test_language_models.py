"""Every workload of a language model does the same each time, and the script measures all of them."""

import pytest
import torch

from benchmarks.language_models import DECODING, TRAINING, WORKLOADS, main, prepare
from linattn.cli.bench.record import BYTES, SECONDS, Case, Setup, read_record

TINY = Setup(heads=2, head_dim=8, window=16)


@pytest.mark.parametrize("work", [name for name in WORKLOADS if name != TRAINING])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_and_a_token_are_the_same_when_called_again(work, dtype):
    first, second = (prepare(TINY, Case(work, "local+elu", dtype, 33)).call() for _ in range(2))
    first, second = (x[0] if isinstance(x, tuple) else torch.as_tensor(x) for x in (first, second))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_training_moves_the_weights(dtype, monkeypatch):
    models = []
    language_model = prepare.__globals__["language_model"]
    monkeypatch.setitem(
        prepare.__globals__, "language_model", lambda *given: models.append(language_model(*given)) or models[0]
    )
    workload = prepare(TINY, Case(TRAINING, "elu", dtype, 33))
    before = [weight.clone() for weight in models[0].parameters()]
    workload.call()
    assert all(not torch.equal(*pair) for pair in zip(before, models[0].parameters(), strict=True))


def test_the_script_measures_all_workloads_and_positions(tmp_path, monkeypatch, capsys):
    path, sizes = tmp_path / "a.json", ["--lengths", "64", "--positions", "70", "--heads", "2", "--head-dim", "8"]
    options = ["--methods", "softmax,elu", "--repeats", "1", "--budget", "10000", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["language_models.py", *sizes, *options])
    main()
    measured = {each.key for each in read_record(path).measurements}
    cases = [(work, 64) for work in WORKLOADS] + [(DECODING, 70)]
    expected = {
        (quantity, work, method, "float32", n)
        for quantity in (SECONDS, BYTES)
        for work, n in cases
        for method in ("softmax", "elu")
    }
    assert measured == expected
    assert "tokens per second" in capsys.readouterr().out
