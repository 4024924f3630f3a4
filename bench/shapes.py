"""Named shapes, once, for benchmarks, tests and tuning. T tokens, H hidden size, F expert FFN size, E experts, K per token."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer with gated experts, and the tokens that it gets."""

    name: str
    T: int
    H: int
    F: int
    E: int
    K: int

    @property
    def M(self) -> int:
        """Routed rows."""
        return self.T * self.K

    @property
    def forward_flops(self) -> int:
        """Useful work of the layer's forward pass: gate and up 4 M H F, down 2 M H F. Backward is twice as much."""
        return 6 * self.M * self.H * self.F

    def with_tokens(self, T: int) -> Shape:
        """The same layer on T tokens."""
        name = f"{T},{self.H},{self.F},{self.E},{self.K}" if "," in self.name else f"{self.name} T={T}"
        return replace(self, name=name, T=T)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("mixtral-8x7b", T=8192, H=4096, F=14336, E=8, K=2),
        Shape("qwen3-30b-a3b", T=32768, H=2048, F=768, E=128, K=8),
        Shape("deepseek-v3-ep8", T=8192, H=7168, F=2048, E=32, K=8),  # one of eight ranks: 32 of the 256 experts
        Shape("olmoe-1b-7b", T=32768, H=2048, F=1024, E=64, K=8),
        Shape("cpu-16", T=2048, H=512, F=1024, E=16, K=2),
        Shape("cpu-64", T=2048, H=512, F=1024, E=64, K=8),
    )
}

LARGEST = 2**31 - 1

GPU_SHAPES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-ep8", "olmoe-1b-7b")


def parse_shape(text: str) -> Shape:
    """A name of `SHAPES`, or "T,H,F,E,K". ValueError says what was expected."""
    if text in SHAPES:
        return SHAPES[text]
    sizes = text.split(",")
    if len(sizes) != 5 or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"shape: expected a name ({', '.join(SHAPES)}) or five positive sizes T,H,F,E,K; got {text!r}. "
            "For example --shape 4096,1024,512,32,4."
        )
    T, H, F, E, K = map(int, sizes)
    if max(T, H, F, E) > LARGEST:
        raise ValueError(f"shape: sizes up to {LARGEST} can be measured; got {text!r}.")
    if K > E:
        raise ValueError(f"shape: {text!r} asks for K={K} different experts per token; E is {E}.")
    return Shape(f"{T},{H},{F},{E},{K}", T, H, F, E, K)
