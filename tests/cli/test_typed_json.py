"""JSON against annotations: what is of a type, what is not, and the files that a damage has made wrong."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from typing_extensions import TypedDict

from linattn.cli.bench.compare import comparison
from linattn.cli.bench.record import BYTES, SECONDS, Measurement, Record, read_record, write_record
from linattn.cli.bench.report import printed
from linattn.cli.options import TrainOptions, recorded_options
from linattn.cli.run_folder import Run, open_run
from linattn.cli.typed_json import read_json
from linattn.console.errors import CommandError


class Pair(TypedDict):
    one: int
    other: float | None


@pytest.mark.parametrize(
    ("kind", "fitting", "others"),
    [
        (int, [0, -3], [True, 1.5, "1", None, []]),
        (float, [0, 1.5, float("inf")], [False, "1.5", None]),
        (bool, [True], [1, "true", None]),
        (str, [""], [1, None, ["a"]]),
        (int | None, [None, 3], ["3", 3.5, False]),
        (str | tuple[str, ...], ["a", ["a", "b"], []], [1, ["a", 1], {"a": "b"}]),
        (list[int], [[], [1, 2]], [[1.5], [True], 3, "12"]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "1"}, [], "a"]),
        (dict[str, Any], [{"a": None}], [[]]),
        (Pair, [{"one": 1, "other": None}, {"one": 1, "other": 2.5}], [{"one": 1}, {"one": "1"}, [1, 2]]),
    ],
)
def test_what_is_of_a_type(kind, fitting, others):
    assert read_json(Pair, '{"one": 1, "other": null, "third": "x"}') == {"one": 1, "other": None}
    for value in fitting:
        read = read_json(kind, json.dumps(value))
        assert read == (tuple(value) if isinstance(read, tuple) else value)
    for value in others:
        with pytest.raises(ValueError, match=r"^([\w.]+: )?(Input|Field) "):
            read_json(kind, json.dumps(value))


def damaged(value: Any, wrong: tuple[Any, ...] = (None, "x", 1.5, [], {}, True)) -> Iterator[Any]:
    """Copies of it, each with one part that is wrong or missing."""
    keys = value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
    for key in keys:
        for other in wrong:
            changed = copy.deepcopy(value)
            changed[key] = other
            yield changed
        changed = copy.deepcopy(value)
        del changed[key]
        yield changed
        for part in damaged(value[key], wrong):
            changed = copy.copy(value)
            changed[key] = part
            yield changed


def test_a_damaged_record_is_told_or_read(tmp_path):
    """None of them ends in another error."""
    record = Record(
        command="linattn bench",
        machine={"processor": "x", "cores": 2, "threads": 1, "torch": "2", "linattn": "1", "date": "2026"},
        options={"batch": 1},
        measurements=(
            Measurement("forward", "elu", "float32", 64, SECONDS, (1.0, 2.0)),
            Measurement("forward", "elu", "float32", 64, BYTES, (5.0,)),
        ),
        dropped={"forward, float32, from n = 64 on, no time was left": ["softmax"]},
        seconds=1.0,
    )
    path = tmp_path / "bench.json"
    write_record(record, path)
    assert read_record(path) == record
    read = 0
    for content in damaged(json.loads(path.read_text())):
        path.write_text(json.dumps(content))
        try:
            found = read_record(path)
        except CommandError as error:
            assert str(error).startswith(str(path))
            continue
        assert comparison(record, found) and comparison(found, record) and printed(found)
        read += 1
    # such as other names and no values of an option
    assert read
    for at in ("", "measurements"):
        write_record(record, path)
        content = json.loads(path.read_text())
        (content[at][0] if at else content)["more"] = 1
        path.write_text(json.dumps(content))
        with pytest.raises(CommandError, match=r"more: (Unexpected|Extra)"):
            read_record(path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"vocabulary": "257"}, "vocabulary: Input should be a valid integer"),
        ({"options": []}, "options: Input should be an object"),
        ({"paths": "text"}, "paths: Input should be a valid array"),
        (
            {"processes": None, "versions": {"torch": 2}},
            "processes: Input should be a valid integer; versions.torch: Input should be a valid string",
        ),
        ({"data": {"training": {}}}, "data.training.documents: Field required; .*; data.validation: Field required"),
    ],
)
def test_a_damaged_description_is_told(tmp_path, damage, told):
    part = {"documents": 1, "bytes": 2, "tokens": 3, "lost_bytes": 0, "sha256": ""}
    fields = {"format": 1, "created": "", "finished": None, "paths": ["text"], "options": {}, "tokenizer": None}
    fields |= {"vocabulary": 257, "data": {"training": part, "validation": part}, "processes": 1, "versions": {}}
    (tmp_path / "run.json").write_text(json.dumps(fields))
    assert open_run(tmp_path).description == fields
    (tmp_path / "run.json").write_text(json.dumps(fields | damage))
    with pytest.raises(CommandError, match=rf"run\.json is corrupt: {told}$"):
        open_run(tmp_path)


@pytest.mark.parametrize("line", ["3", "[]", "null", '{"step": 1}', '{"step": "1", "tokens": 2, "seconds": 1}'])
def test_a_damaged_log_is_told(tmp_path, line):
    run = Run(tmp_path, {})
    good = {"step": 1, "tokens": 2, "seconds": 0.5, "gradient_norm": None}
    run.log.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(CommandError, match=r"log\.jsonl is corrupt: a line is "):
        list(run.records())


@pytest.mark.usefixtures("unchecked")
def test_a_run_from_before_the_epsilon_of_norms_keeps_none():
    assert recorded_options({"head_norm": True}).head_norm_eps == 0
    assert recorded_options({"head_norm": True, "head_norm_eps": 1e-5}).head_norm_eps == 1e-5


def test_recorded_options_have_their_types():
    assert recorded_options({"attention": ["elu", "local"], "lr": 1}) == TrainOptions(attention=("elu", "local"), lr=1)
    for wrong in ({"batch": "4"}, {"cpu": 1}, {"attention": [1]}, {"lr": None}, {"steps": 1.5}):
        with pytest.raises(CommandError, match=r"options that no run has: \w+.*: Input should be "):
            recorded_options(wrong)
