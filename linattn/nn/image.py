"""Attention between the pixels of an image, or between its channels, with convolutions for projections."""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.attention.linear import LinearAttention
from linattn.checks import check_sizes, check_tensors, check_types, given
from linattn.feature_maps.efficient import EfficientFeatureMap
from linattn.feature_maps.taylor import TaylorFeatureMap
from linattn.nn.checks import check_floats, check_input

Size = int | tuple[int, int]
Image = Float[Tensor, "b c h w"]
# or one mask for all images
PixelMask = Bool[Tensor, "#b h w"] | None


@final
class ImageLinearAttention(nn.Module):
    """y = W_o concat_h((φ(q)/z) S) with q, k and v convolutions of the image: φ(q) is the softmax of q d^-¼ over
    channels (without `norm_queries`, q d^-¼ itself), φ(k)/z the softmax of k d^-¼ over pixels, d = `key_dim`. Shen et
    al., Efficient Attention, https://arxiv.org/abs/1812.01243

    x has `chan` channels and y `chan_out` (default: `chan`); each of the `heads` has `key_dim` channels of q and k and
    `value_dim` of v. All four convolutions have the same `kernel_size` and `padding` with zeros. The convolutions of q,
    k and v have a `stride`. It makes the result smaller, and so does `kernel_size` without `padding`.

    Images need not be square, nor their sizes multiples of anything; no residual is added. With a context, another
    image or a set of pixels (b, chan, m), queries attend to the pixels of both.

    Masks are True for present pixels. The others are treated as lying outside of the image: the convolutions read zeros
    there, and they are no keys. A small image within a larger one gives what it gives alone, if its offset from the top
    and the left is a multiple of the stride."""

    @check_types
    def __init__(
        self,
        chan: int,
        chan_out: int | None = None,
        kernel_size: Size = 1,
        padding: Size = 0,
        stride: Size = 1,
        key_dim: int = 64,
        value_dim: int = 64,
        heads: int = 8,
        norm_queries: bool = True,
    ):
        super().__init__()
        check_sizes(chan=chan, key_dim=key_dim, value_dim=value_dim, heads=heads, **given(chan_out=chan_out))
        check_sizes(kernel_size=kernel_size, stride=stride)
        check_sizes(padding=padding, least=0)
        self.chan, self.key_dim, self.value_dim, self.heads = chan, key_dim, value_dim, heads
        self.to_q = nn.Conv2d(chan, key_dim * heads, kernel_size, stride, padding)
        self.to_k = nn.Conv2d(chan, key_dim * heads, kernel_size, stride, padding)
        self.to_v = nn.Conv2d(chan, value_dim * heads, kernel_size, stride, padding)
        self.to_out = nn.Conv2d(value_dim * heads, chan if chan_out is None else chan_out, kernel_size, padding=padding)
        self.inner = LinearAttention(EfficientFeatureMap(norm_queries=norm_queries))

    def forward(
        self,
        x: Image,
        context: Float[Tensor, "b c *m"] | None = None,
        *,
        mask: PixelMask = None,
        context_mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "b o h2 w2"]:
        check_tensors(x=x, **given(context=context, mask=mask, context_mask=context_mask))
        x = _checked(x, mask, self.chan)
        check_input(x, self.to_q)
        _check_size(x, self.to_q, "x")
        if context is None and context_mask is not None:
            raise ValueError("context_mask is of a context, but none was given")
        q = self.to_q(x)
        present = None if mask is None else self._mask_after(mask)
        keys = [(self.to_k(x), self.to_v(x), present)]
        if context is not None:
            keys.append(self._context(context, context_mask, len(x)))
        k = torch.cat([_pixels(k, self.heads) for k, _, _ in keys], -2)
        v = torch.cat([_pixels(v, self.heads) for _, v, _ in keys], -2)
        scale = self.key_dim**-0.25
        y = self.inner(_pixels(q, self.heads) * scale, k * scale, v, key_mask=_key_mask(keys))
        y = y.mT.flatten(1, 2).unflatten(-1, q.shape[-2:])
        _check_size(y, self.to_out, "the attended x")
        return self.to_out(_zero_missing(y, present))

    def _context(self, context: Tensor, mask: Tensor | None, batch_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
        check_input(context, self.to_k, name="context")
        context = _checked(context, mask, self.chan, name="context", flat=True)
        if context.ndim == 3:
            context, mask = context.unsqueeze(2), None if mask is None else mask.unsqueeze(1)
        _check_size(context, self.to_k, "context")
        if len(context) != batch_size:
            raise ValueError(
                f"x and the context must have one batch size, but they have {batch_size} and {len(context)}"
            )
        return self.to_k(context), self.to_v(context), None if mask is None else self._mask_after(mask)

    def _mask_after(self, mask: Bool[Tensor, "b h w"]) -> Bool[Tensor, "b h2 w2"]:
        """Return the mask of the convolutions' outputs: True where the image of present pixels alone has outputs."""
        kernel, stride, padding = self.to_q.kernel_size, self.to_q.stride, self.to_q.padding
        assert not isinstance(padding, str)
        inside = [k - 2 * p for k, p in zip(kernel, padding, strict=True)]
        if min(inside) < 1:
            raise ValueError(f"a masked image takes padding below half the kernel, but they are {padding} and {kernel}")
        missing = F.max_pool2d((~mask).to(torch.float32).unsqueeze(1), inside, stride)
        return missing.squeeze(1) == 0


@final
class PositionLinearAttention(nn.Module):
    """x + γ y with y_i = Σ_j (1 + cos(q_i, k_j)) v_j / Σ_j (1 + cos(q_i, k_j)) over the pixels j; γ starts at zero.

    x and v have `channels`, q and k `key_channels` (an eighth of them, at least one). Images need not be square, and a
    pixel of zeros causes no division by zero. Masked pixels (False) come back unchanged. Li et al., Linear Attention
    Mechanism, https://arxiv.org/abs/2007.14902"""

    @check_types
    def __init__(self, channels: int, key_channels: int | None = None):
        super().__init__()
        check_sizes(channels=channels, **given(key_channels=key_channels))
        keys = max(1, channels // 8) if key_channels is None else key_channels
        self.query_conv = nn.Conv2d(channels, keys, 1)
        self.key_conv = nn.Conv2d(channels, keys, 1)
        self.value_conv = nn.Conv2d(channels, channels, 1)
        self.gamma = nn.Parameter(torch.empty(1))
        self.inner = LinearAttention(TaylorFeatureMap())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gamma)

    def forward(self, x: Image, *, mask: PixelMask = None) -> Image:
        pixels = _checked(x, mask, self.query_conv.in_channels)
        check_input(x, self.query_conv)
        _check_size(x, self.query_conv, "x")
        parts = [convolution(pixels) for convolution in (self.query_conv, self.key_conv, self.value_conv)]
        q, k, v = (part.flatten(2).mT.unsqueeze(1) for part in parts)
        y = self.inner(q, k, v, key_mask=None if mask is None else mask.flatten(1).unsqueeze(1))
        return x + self.gamma * _zero_missing(y.squeeze(1).mT.view_as(x), mask)


@final
class ChannelLinearAttention(nn.Module):
    """x + γ y with y_c = Σ_e (1 + cos(x_c, x_e)) x_e / Σ_e (1 + cos(x_c, x_e)) over the channels e, each a vector of
    all pixels; γ starts at zero. Images may have any size; masked pixels (False) come back unchanged. Li et al., Linear
    Attention Mechanism, https://arxiv.org/abs/2007.14902"""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(1))
        self.inner = LinearAttention(TaylorFeatureMap())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gamma)

    def forward(self, x: Image, *, mask: PixelMask = None) -> Image:
        check_floats(x, self.gamma)
        channels = _checked(x, mask).flatten(2).unsqueeze(1)
        y = self.inner(channels, channels, channels)
        return x + self.gamma * y.squeeze(1).view_as(x)


def _checked(
    x: Tensor, mask: Tensor | None, channels: int | None = None, *, name: str = "x", flat: bool = False
) -> Tensor:
    """Return the image with zeros in the place of missing pixels. Raise ValueError unless it has this number of
    `channels` (None: any number), and the mask the height and width of the image. With `flat` it may be (b, c, m)."""
    check_tensors(**{name: x}, **given(mask=mask))
    check_floats(x, name=name)
    if not (x.ndim == 4 or (flat and x.ndim == 3)) or channels not in (None, x.shape[1]):
        front = f"(b, {channels or 'channels'},"
        shapes = f"{front} h, w) or {front} m)" if flat else f"{front} h, w)"
        raise ValueError(f"{name} must be {shapes}, but is {tuple(x.shape)}")
    if mask is not None:
        expected, shape = (len(x), *x.shape[2:]), tuple(mask.shape)
        if mask.dtype != torch.bool or shape not in (expected, (1, *expected[1:])):
            raise ValueError(f"a mask must be boolean {expected}, True where a pixel is, but is {mask.dtype} {shape}")
    return _zero_missing(x, mask)


def _check_size(x: Image, convolution: nn.Conv2d, name: str) -> None:
    """Raise ValueError if an image, with its padding, is smaller than the kernel of the convolution."""
    kernel, padding, size = convolution.kernel_size, convolution.padding, tuple(x.shape[2:])
    assert not isinstance(padding, str)
    if any(n + 2 * p < k for n, p, k in zip(size, padding, kernel, strict=True)):
        raise ValueError(f"{name} must be at least as large as the kernel, {kernel}, but is {size} + 2 · {padding}")


def _zero_missing(x: Tensor, mask: Tensor | None) -> Tensor:
    """Put zeros in the place of missing pixels."""
    return x if mask is None else torch.where(mask.unsqueeze(1), x, 0)


def _pixels(x: Float[Tensor, "b hd h w"], heads: int) -> Float[Tensor, "b heads n d"]:
    return x.flatten(2).unflatten(1, (heads, -1)).mT


def _key_mask(keys: list[tuple[Tensor, Tensor, Tensor | None]]) -> Bool[Tensor, "b 1 n"] | None:
    if all(mask is None for _, _, mask in keys):
        return None
    whole = torch.ones((), dtype=torch.bool, device=keys[0][0].device)
    masks = [(whole if mask is None else mask).expand(len(k), *k.shape[2:]) for k, _, mask in keys]
    return torch.cat([mask.flatten(1) for mask in masks], 1).unsqueeze(1)
