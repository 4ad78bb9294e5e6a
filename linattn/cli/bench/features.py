"""How far each feature map's attention is from that of softmax, against its number of features."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from linattn.cli.bench.real_text import Layers, Sample
from linattn.cli.bench.record import ERROR, Measurement
from linattn.diagnostics import compare_with_softmax
from linattn.feature_maps import (
    ElementwiseFeatureMap,
    FavorFeatureMap,
    FeatureMap,
    GeneralizedFeatureMap,
    HyperbolicFavorFeatureMap,
    RandomProjection,
    SecondOrderTaylorFeatureMap,
    TaylorFeatureMap,
    TrigonometricFavorFeatureMap,
)
from linattn.feature_maps.efficient import EfficientFeatureMap

WORK, UNIFORM = "feature maps", "uniform attention"
COUNTS, DRAWS = (16, 32, 64, 128, 256, 512, 1024), 3

RANDOM: dict[str, Callable[[int, int], FeatureMap]] = {
    "favor": FavorFeatureMap,
    "favor_hyperbolic": HyperbolicFavorFeatureMap,
    "favor_trigonometric": TrigonometricFavorFeatureMap,
    "favor_relu": lambda d, f: GeneralizedFeatureMap(torch.relu, epsilon=1e-3, projection=RandomProjection(d, f)),
}
FIXED: dict[str, Callable[[], FeatureMap]] = {
    "elu": lambda: ElementwiseFeatureMap("elu_plus_one"),
    "efficient": EfficientFeatureMap,
    "taylor": TaylorFeatureMap,
    "taylor2": SecondOrderTaylorFeatureMap,
}


def measure_features(sample: Sample, deadline: float) -> Iterator[Measurement]:
    """‖A v − P v‖ / ‖P v‖ of causal attention, means over heads and layers; a value for each draw of a random map.

    Few features first, and no further when the deadline passes."""
    d = sample.layers[0][0].shape[-1]
    yield _measurement(UNIFORM, 1, [statistics.fmean(_errors(sample.layers, None))])
    for name, make in FIXED.items():
        feature_map = make()
        count = feature_map.scaled_query(torch.ones(1, 1, 1, d))[0].shape[-1]
        yield _measurement(name, count, [statistics.fmean(_errors(sample.layers, feature_map))])
    for count in COUNTS:
        for name, make_random in RANDOM.items():
            if time.monotonic() > deadline:
                return
            torch.manual_seed(0)
            maps = [make_random(d, count) for _ in range(DRAWS)]
            yield _measurement(name, count, [statistics.fmean(_errors(sample.layers, each)) for each in maps])


def _errors(layers: Layers, feature_map: FeatureMap | None) -> list[float]:
    """Of each layer; without a map, of attending to all keys alike."""
    errors = []
    for q, k, v in layers:
        found = compare_with_softmax(q, k, feature_map or TaylorFeatureMap(), v=v, causal=True)
        error = found.uniform_output_error if feature_map is None else found.output_error
        errors.append(error.mean().item())
    return errors


def _measurement(name: str, count: int, values: list[float]) -> Measurement:
    return Measurement(ERROR, WORK, name, "float32", count, tuple(values))
