"""Distance of each feature map's attention from that of softmax, by number of features."""

import time
from collections.abc import Callable, Iterator

import torch

from linattn.cli.bench.real_text import Layers, Sample
from linattn.cli.bench.record import ERROR, Measurement
from linattn.cli.bench.workloads import num_features
from linattn.diagnostics import compare_with_softmax
from linattn.feature_maps import (
    FEATURE_MAPS,
    FavorFeatureMap,
    FeatureMap,
    GeneralizedFeatureMap,
    HyperbolicFavorFeatureMap,
    RandomProjection,
    TrigonometricFavorFeatureMap,
)

WORKLOAD, UNIFORM = "feature maps", "uniform attention"
COUNTS, DRAWS = (16, 32, 64, 128, 256, 512, 1024), 3
FIXED = ("elu", "efficient", "taylor", "taylor2")
RANDOM: dict[str, Callable[[int, int], FeatureMap]] = {
    "favor": FavorFeatureMap,
    "favor_hyperbolic": HyperbolicFavorFeatureMap,
    "favor_trigonometric": TrigonometricFavorFeatureMap,
    "favor_relu": lambda d, f: GeneralizedFeatureMap(torch.relu, epsilon=1e-3, projection=RandomProjection(d, f)),
}


def measure_features(sample: Sample, deadline: float) -> Iterator[Measurement]:
    """Measure ‖A v − P v‖ / ‖P v‖ of causal attention, the mean over heads and layers; random maps have three values.

    Few features go first, and no more follow when the deadline passes."""

    def measured(name: str, count: int, maps: list[FeatureMap | None]) -> Measurement:
        errors = tuple(_error(sample.layers, each) for each in maps)
        return Measurement(ERROR, WORKLOAD, name, "float32", count, errors)

    d = sample.layers[0][0].shape[-1]
    yield measured(UNIFORM, 1, [None])
    for name in FIXED:
        feature_map = FEATURE_MAPS[name](d, 1, 1)
        yield measured(name, num_features(feature_map, torch.ones(1, 1, 1, d)), [feature_map])
    for count in COUNTS:
        for name, make in RANDOM.items():
            if time.monotonic() > deadline:
                return
            torch.manual_seed(0)
            yield measured(name, count, [make(d, count) for _ in range(DRAWS)])


def _error(layers: Layers, feature_map: FeatureMap | None) -> float:
    """Without a map, return the error of attending to all keys alike."""
    some = feature_map or FEATURE_MAPS["elu"](1, 1, 1)
    found = [compare_with_softmax(q, k, some, v=v, causal=True) for q, k, v in layers]
    errors = [each.output_error if feature_map else each.uniform_output_error for each in found]
    return torch.stack(errors).mean().item()
