"""The attentions of other packages run, and each is beside the method of ours that computes the same."""

import dataclasses

import pytest
import torch

from benchmarks.peers import PEERS, installed, main, methods, prepare
from linattn.cli.bench.record import Case, Setup, read_record

TINY = Setup(heads=2, head_dim=8, window=16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_installed_does_its_work(name, causal):
    if name not in installed(causal):
        pytest.skip("not installed, or it cannot be so")
    y, (dq, *_) = (
        prepare(dataclasses.replace(TINY, causal=causal), Case(work, name, "float32", 128)).call()
        for work in ("forward", "training")
    )
    assert y.shape == dq.shape == (1, 2, 128, 8)
    assert y.any() and dq.any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["performer-pytorch (efficient)", "linear-attention-transformer"])
def test_a_peer_is_the_method_that_it_is_compared_with(name, causal):
    if name not in installed(causal):
        pytest.skip("not installed")
    setup = dataclasses.replace(TINY, causal=causal)
    theirs, ours = (
        prepare(setup, Case("forward", method, "float32", 64)).call()
        for method in (name, PEERS[name].counterpart[causal])
    )
    # theirs have floors under their sums, and a scale of their own where keys are normalised
    cosine = torch.nn.functional.cosine_similarity(theirs.flatten(), ours.flatten(), 0)
    assert cosine > 0.9999


def test_the_script_measures_all_that_are_installed(tmp_path, monkeypatch, capsys):
    sizes = ["--lengths", "64", "--heads", "2", "--head-dim", "8", "--window", "16", "--repeats", "1"]
    path = tmp_path / "a.json"
    monkeypatch.setattr("sys.argv", ["peers.py", "--workloads", "forward", "--json", str(path), *sizes])
    main()
    measured = {each.method for each in read_record(path).measurements}
    shown = capsys.readouterr().out
    assert measured == set(methods(causal=True)) and all(name in shown for name in measured)
