"""The error of each feature map's attention against softmax, on the queries and keys of a language model.

    python benchmarks/feature_map_errors.py [--model RUN] [--text FILE] [--minutes 1] [--json FILE]

The error is ‖y − y_softmax‖ / ‖y_softmax‖ of causal attention, the mean over heads and layers. Random maps are sampled
three times, with 16 to 1,024 features. A map whose error is not below that of uniform attention, which averages all
values, is no approximation of softmax. Without --model, `linattn train` first trains a small softmax model on --text,
or on the modules of Python's standard library, for so many minutes."""

import argparse
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from linattn import feature_maps as maps
from linattn.cli.bench.report import aligned
from linattn.cli.main import main as linattn
from linattn.cli.run_folder import open_run
from linattn.data.row import TokenRow
from linattn.data.windows import validation_windows
from linattn.diagnostics import compare_with_softmax
from linattn.models import LanguageModel
from linattn.nn import MultiheadAttention

CONTEXT, SEQUENCES, MOST_BYTES = 256, 2, 4_000_000
# of linattn train
SMALL = "--attention softmax --dim 128 --depth 2 --num-heads 2 --convolution 0 --context 256 --batch 8"
# the schedule with which the figures of docs/feature_maps.md were measured
SCHEDULE = "--optimizer adamw --lr 3e-3 --warmup 0.05"
BRIEF = "--validation-part 0.1 --evaluate-tokens 16384 --evaluate-every 1000000 --save-every 1000000 --cpu"
COUNTS, SAMPLES = (16, 32, 64, 128, 256, 512, 1024), 3
FIXED = ("elu", "efficient", "taylor", "taylor2")
RANDOM: dict[str, Callable[[int, int], maps.FeatureMap]] = {
    "favor": maps.FavorFeatureMap,
    "favor_hyperbolic": maps.HyperbolicFavorFeatureMap,
    "favor_trigonometric": maps.TrigonometricFavorFeatureMap,
    "favor_relu": lambda d, f: maps.GeneralizedFeatureMap(
        torch.relu, epsilon=1e-3, projection=maps.RandomProjection(d, f)
    ),
}
Layers = list[tuple[Tensor, Tensor, Tensor]]
"""Each layer's queries, keys and values."""


class Errors(NamedTuple):
    feature_map: str
    features: int
    values: list[float]
    """One for each sample of a random map."""


def measure(layers: Layers) -> Iterator[Errors]:
    d = layers[0][0].shape[-1]
    fixed = {name: maps.FEATURE_MAPS[name](d, 1, 1) for name in FIXED}
    yield Errors("uniform attention", 0, errors(layers, [fixed["elu"]], "uniform_output_error"))
    for name, feature_map in fixed.items():
        features = feature_map.query(torch.ones(1, 1, 1, d)).x.shape[-1]
        yield Errors(name, features, errors(layers, [feature_map]))
    for count in COUNTS:
        for name, build in RANDOM.items():
            torch.manual_seed(0)
            yield Errors(name, count, errors(layers, [build(d, count) for _ in range(SAMPLES)]))


@torch.no_grad()
def errors(layers: Layers, samples: Sequence[maps.FeatureMap], field: str = "output_error") -> list[float]:
    comparisons = ([compare_with_softmax(q, k, each, v=v, causal=True) for q, k, v in layers] for each in samples)
    return [torch.stack([getattr(one, field) for one in each]).mean().item() for each in comparisons]


def layers_of_run(folder: Path, text: Path | None) -> Layers:
    """Return the inputs of attention for text that the model has not seen."""
    run = open_run(folder)
    if text is None:
        return layers_of_model(run.model(), run.tokens("validation"))
    vocabulary = run.vocabulary()
    tokens = np.asarray(vocabulary.encode(text.read_bytes()[:MOST_BYTES]), vocabulary.dtype)
    return layers_of_model(run.model(), tokens)


def layers_of_training(text: Path | None, minutes: float) -> Layers:
    """Train a small softmax model, and return the inputs of its attention for the last tenth of the text."""
    data = [text] if text else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        options = ["--out", str(run), "--minutes", str(minutes), *SMALL.split(), *SCHEDULE.split(), *BRIEF.split()]
        if status := linattn(["train", *map(str, data), *options]):
            raise SystemExit(status)
        *_, last = open_run(run).records()
        print(f"{last['step']:,} steps, {last['validation_bits_per_byte']:.2f} bits per byte")
        return layers_of_run(run, None)


@torch.no_grad()
def layers_of_model(model: LanguageModel, tokens: TokenRow | np.ndarray) -> Layers:
    """Return the inputs of each layer's inner attention, positions included, for evenly spread sequences."""
    if len(tokens) < CONTEXT:
        raise SystemExit(f"there must be {CONTEXT} tokens of text, but there are {len(tokens)}")
    windows = [each["input_ids"] for each in validation_windows(tokens, CONTEXT, most=SEQUENCES)]
    layers: Layers = []
    for part in model.eval().modules():
        if isinstance(part, MultiheadAttention):
            # returns None, because another value would replace the inputs
            part.inner.register_forward_pre_hook(lambda _, inputs: layers.append(inputs))
    model(torch.stack(windows))
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="RUN", help="folder of linattn train")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to read")
    parser.add_argument("--minutes", type=float, default=1.0, help="training time without --model (default: 1)")
    parser.add_argument("--json", type=Path, help="write the errors here too")
    options = parser.parse_args()
    if options.model:
        layers = layers_of_run(options.model, options.text)
    else:
        layers = layers_of_training(options.text, options.minutes)
    found = list(measure(layers))
    rows = [[name, f"{count:,}", f"{fmean(x):.3g}", f"{min(x):.3g} … {max(x):.3g}"] for name, count, x in found]
    print(aligned([["", "features", "error", "samples"], *rows]))
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
