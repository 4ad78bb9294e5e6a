"""Linear-complexity attention for PyTorch, with the same numbers in training and token by token.

`attend` takes raw q, k and v; `MultiheadAttention` goes into your own model; `LanguageModel` is a complete model. The
public names are those of the packages `attention`, `diagnostics`, `feature_maps`, `generation`, `models`, `nn`, `ops`
and `integrations.torch`."""

from linattn import attention, diagnostics, feature_maps, generation, models, nn, ops
from linattn.attention import *
from linattn.diagnostics import *
from linattn.feature_maps import *
from linattn.generation import *
from linattn.integrations import torch as _torch
from linattn.integrations.torch import *
from linattn.models import *
from linattn.nn import *
from linattn.ops import *
from linattn.version import __version__ as __version__

__all__ = []
__all__ += attention.__all__
__all__ += diagnostics.__all__
__all__ += feature_maps.__all__
__all__ += generation.__all__
__all__ += models.__all__
__all__ += nn.__all__
__all__ += _torch.__all__
__all__ += ops.__all__
