"""Distance of each feature map's attention from that of softmax, on the queries and keys of a language model."""

import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from linattn import feature_maps as maps
from linattn.cli import train
from linattn.cli.bench import UNIFORM, WITH_FEATURES
from linattn.cli.bench.record import ERROR, Measurement
from linattn.cli.bench.workloads import num_features
from linattn.cli.main import make_parser
from linattn.cli.run_folder import open_run
from linattn.cli.windows import open_tokens, validation_windows
from linattn.console.errors import CommandError
from linattn.diagnostics import compare_with_softmax
from linattn.models import LanguageModel
from linattn.nn import MultiheadAttention

CONTEXT, SEQUENCES, MOST_BYTES = 256, 2, 4_000_000
# of linattn train
SMALL = "--attention softmax --dim 128 --depth 2 --num-heads 2 --convolution 0 --context 256 --batch 8 --lr 3e-3"
BRIEF = "--validation-part 0.1 --evaluate-tokens 16384 --evaluate-every 1000000 --save-every 1000000 --cpu"
COUNTS, DRAWS = (16, 32, 64, 128, 256, 512, 1024), 3
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


def measure_features(layers: Layers, deadline: float) -> Iterator[Measurement]:
    """Measure ‖A v − P v‖ / ‖P v‖ of causal attention, the mean over heads and layers; random maps have three values.

    Few features go first, and no more follow when the deadline passes."""
    d = layers[0][0].shape[-1]
    fixed = {name: maps.FEATURE_MAPS[name](d, 1, 1) for name in FIXED}
    yield _measured(layers, UNIFORM, 1, [fixed["elu"]], "uniform_output_error")
    for name, feature_map in fixed.items():
        yield _measured(layers, name, num_features(feature_map, torch.ones(1, 1, 1, d)), [feature_map])
    for count in COUNTS:
        for name, make in RANDOM.items():
            if time.monotonic() > deadline:
                return
            torch.manual_seed(0)
            yield _measured(layers, name, count, [make(d, count) for _ in range(DRAWS)])


def _measured(
    layers: Layers, name: str, count: int, draws: Sequence[maps.FeatureMap], error: str = "output_error"
) -> Measurement:
    found = ([compare_with_softmax(q, k, each, v=v, causal=True) for q, k, v in layers] for each in draws)
    values = (torch.stack([getattr(one, error) for one in each]).mean().item() for each in found)
    return Measurement(WITH_FEATURES, name, "float32", count, ERROR, tuple(values))


def layers_of_run(folder: Path, text: Path | None) -> tuple[Layers, str]:
    """Return each layer's queries, keys and values for text that the model has not seen, and a sentence on them."""
    run = open_run(folder)
    vocabulary = run.vocabulary()
    if text is None:
        tokens = open_tokens(run, "validation")
    else:
        tokens = np.asarray(vocabulary.encode(text.read_bytes()[:MOST_BYTES]), vocabulary.dtype)
    source = f"Queries and keys are those of the model in {folder} on {text or 'its validation data'}."
    return _layers(run.model(), tokens), source


def layers_of_training(text: Path | None, seconds: float) -> tuple[Layers, str]:
    """Let `linattn train` train a small softmax model for so many seconds, and show it the last tenth of the text."""
    data = [text] if text else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        options = ["--out", str(run), "--minutes", str(seconds / 60), *SMALL.split(), *BRIEF.split()]
        train.run(make_parser().parse_args(["train", *map(str, data), *options]))
        *_, last = open_run(run).records()
        layers, _ = layers_of_run(run, None)
    return layers, (
        "Queries and keys are those of a softmax model of 2 layers, 2 heads of 64 channels and rotary positions, on "
        f"text that it has not seen; it learned {text or 'the modules of the standard library'} for {last['step']:,} "
        f"steps of 2,048 bytes, down to {last['validation_bits_per_byte']:.2f} bits per byte."
    )


def _layers(model: LanguageModel, tokens: np.ndarray) -> Layers:
    """Return the inputs of each layer's inner attention, positions included, for evenly spread sequences."""
    if len(tokens) < CONTEXT:
        raise CommandError(f"there must be {CONTEXT} tokens of text to look at, but there are {len(tokens)}")
    windows = [each["input_ids"] for each in validation_windows(tokens, CONTEXT, most=SEQUENCES)]
    layers: Layers = []
    for part in model.eval().modules():
        if isinstance(part, MultiheadAttention):
            # returns None, because another value would replace the inputs
            part.inner.register_forward_pre_hook(lambda _, inputs: layers.append(inputs))
    with torch.no_grad():
        model(torch.stack(windows))
    return layers
