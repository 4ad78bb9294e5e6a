"""Causal linear attention is a recurrent network: with h heads, 2h states of constant size, and the same outputs.
Katharopoulos et al., https://arxiv.org/abs/2006.16236, section 3.4; the talk's slide on several heads

    python -m examples.talk.recurrence --out docs/talk-recurrence.svg"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from examples.pictures import picture
from examples.talk.pictures import BLACK, BLUE, ORANGE, panels, save, tidy
from linattn import MultiheadAttention, map_state, named_attention

DIM, HEADS = 256, 4
POSITIONS = tuple(2**i for i in range(6, 15))


class States(NamedTuple):
    """The slide's sⁱ and zⁱ: two for each head."""

    s: list[Float[Tensor, "d dv"]]
    z: list[Float[Tensor, " d"]]


def phi(x: Tensor) -> Tensor:
    return nn.functional.elu(x) + 1


def first_states(layer: MultiheadAttention, num_heads: int) -> States:
    """s₀ = z₀ = 0"""
    d, weight = layer.head_dim, layer.q_proj.weight
    return States([weight.new_zeros(d, d) for _ in range(num_heads)], [weight.new_zeros(d) for _ in range(num_heads)])


def step(
    layer: MultiheadAttention, f: nn.Module, x: Float[Tensor, " c"], states: States
) -> tuple[Float[Tensor, " c"], States]:
    """The slide, line by line, for one token x_t and a layer's weights."""
    heads, s, z = [], [], []
    for i, (s_before, z_before) in enumerate(zip(*states, strict=True)):
        rows = slice(i * layer.head_dim, (i + 1) * layer.head_dim)
        q, k, v = (projection.weight[rows] @ x for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
        s.append(s_before + torch.outer(phi(k), v))
        z.append(z_before + phi(k))
        heads.append(phi(q) @ s[i] / (phi(q) @ z[i]))
    a = layer.o_proj.weight @ torch.cat(heads)
    return f(a + x), States(s, z)


def make_layer(attention: str, *, dim: int = DIM, num_heads: int = HEADS) -> MultiheadAttention:
    return MultiheadAttention(
        dim, num_heads, named_attention(attention, num_heads=num_heads, head_dim=dim // num_heads, causal=True)
    ).eval()


def state_bytes(state: Any) -> int:
    sizes: list[int] = []
    map_state(lambda x: sizes.append(x.numel() * x.element_size()) or x, state)
    return sum(sizes)


@torch.no_grad()
def costs(attention: str, positions: Sequence[int], *, repeats: int = 30) -> list[tuple[float, int]]:
    """Seconds for the next token after so many others, median of many, and the bytes that are carried along."""
    layer, found = make_layer(attention), []
    for position in positions:
        _, state = layer.extend(torch.randn(1, position, DIM))
        token = torch.randn(1, 1, DIM)
        found.append(
            (_median(lambda state=state, token=token: layer.extend(token, state), repeats), state_bytes(state))
        )
    return found


@torch.no_grad()
def softmax_alone(positions: Sequence[int], *, repeats: int = 30) -> list[float]:
    """Seconds for softmax over keys and values that are there already: what no cache can save."""
    found = []
    for position in positions:
        q, k, v = (torch.randn(1, HEADS, n, DIM // HEADS) for n in (1, position + 1, position + 1))
        found.append(_median(lambda q=q, k=k, v=v: nn.functional.scaled_dot_product_attention(q, k, v), repeats))
    return found


def _median(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    # the first ones warm up
    return statistics.median(times[3:])


@torch.no_grad()
def difference(tokens: int) -> dict[str, float]:
    """Return the largest differences from the parallel form, in float64: of the slide's outputs, and of the library's
    token by token."""
    layer, f = make_layer("elu").double(), nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()).double()
    x = torch.randn(tokens, DIM, dtype=torch.float64)
    parallel = f(layer(x[None])[0] + x)
    states, state, by_hand, extended = first_states(layer, HEADS), None, [], []
    for token in x:
        y, states = step(layer, f, token, states)
        by_hand.append(y)
        a, state = layer.extend(token[None, None], state)
        extended.append(f(a[0, 0] + token))
    return {
        "the slide, by hand": (torch.stack(by_hand) - parallel).abs().max().item(),
        "extend, one token at a time": (torch.stack(extended) - parallel).abs().max().item(),
    }


def draw(positions: Sequence[int], found: dict[str, list[tuple[float, int]]], alone: list[float], path: Path) -> None:
    figure, (row,) = panels(2, width=4.6)
    styles = {"softmax": (ORANGE, "s", "softmax: all keys and values"), "elu": (BLUE, "o", "elu + 1: s and z")}
    for name, (colour, marker, label) in styles.items():
        seconds, sizes = zip(*found[name], strict=True)
        style = {"color": colour, "marker": marker, "markersize": 5, "label": label}
        row[0].plot(positions, [1e6 * s for s in seconds], **style)
        row[1].plot(positions, [size / 1024 for size in sizes], **style)
    label = "softmax: attention alone, keys in place"
    row[0].plot(positions, [1e6 * s for s in alone], color=BLACK, linestyle=":", label=label)
    for axes, what in zip(row, ("time of the next token, µs", "state, KiB"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        tidy(axes, xlabel="tokens before it", ylabel=what)
    row[0].set_ylim(bottom=5)
    row[0].set_title(f"A layer of {HEADS} heads of {DIM // HEADS} channels", loc="left", fontsize=10)
    row[0].legend(frameon=False, fontsize=8)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=picture, required=True, help="the picture")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, value in difference(300).items():
        print(f"{name}: at most {value:.1e} from the parallel form, float64, 300 tokens")
    found = {attention: costs(attention, POSITIONS) for attention in ("elu", "softmax")}
    alone = softmax_alone(POSITIONS)
    print("| tokens before | elu + 1, µs | state, KiB | softmax, µs | state, KiB | its attention alone, µs |")
    print("|---:|---:|---:|---:|---:|---:|")
    for position, *pairs, least in zip(POSITIONS, *found.values(), alone, strict=True):
        cells = (f"{1e6 * seconds:.0f} | {size / 1024:,.0f}" for seconds, size in pairs)
        print(f"| {position:,} | {' | '.join(cells)} | {1e6 * least:.0f} |")
    draw(POSITIONS, found, alone, options.out)


if __name__ == "__main__":
    main()
