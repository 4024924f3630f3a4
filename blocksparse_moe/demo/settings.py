"""What the demo was asked for, and the text that it learns."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TEXT_BYTES = 2**21


class DemoError(Exception):
    """The demo cannot run as asked; the message is one line for the person who asked."""


@dataclass(frozen=True)
class Settings:
    """The options of the command; `blocksparse-moe demo --help` explains them.

    Raises:
        DemoError: a number that makes no sense, an unknown dtype, a device that is not there.
    """

    steps: int = 150
    device: str | None = None
    backend: str = "auto"
    dtype: str = "float32"
    text: Path | None = None
    output: Path = Path("runs/demo")
    seed: int = 0
    batch_size: int = 8
    sequence_length: int = 128
    experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "seed": 0, "batch_size": 1, "sequence_length": 2, "experts": 1, "top_k": 1}.items():
            if (value := getattr(self, name)) < least:
                raise DemoError(f"--{name.replace('_', '-')} must be at least {least}; got {value}.")
        if self.seed >= 2**63:
            raise DemoError(f"--seed must be below 2**63; got {self.seed}.")
        if self.top_k > self.experts:
            raise DemoError(f"--top-k {self.top_k} exceeds --experts {self.experts}.")
        if self.dtype not in DTYPES:
            raise DemoError(f"--dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        _ = self.torch_device

    @property
    def torch_device(self) -> torch.device:
        """The device to train on: the one asked for, or cuda where there is one, or cpu."""
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or not (index.isdecimal() or self.device == kind):
            raise DemoError(f"--device must be cpu, cuda or cuda:N; got {self.device!r}.")
        there = torch.cuda.device_count() if kind == "cuda" else 1
        if int(index or 0) >= there:
            raise DemoError(f"--device {self.device} is not there; torch {torch.__version__} sees {there} {kind} device(s).")
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def tokens(self) -> int:
        """T, tokens of a batch."""
        return self.batch_size * self.sequence_length


@dataclass(frozen=True)
class Text:
    """What is learnt, byte by byte.

    Attributes:
        source: what it is, for people.
        data: [bytes] uint8.
    """

    source: str
    data: Tensor

    @classmethod
    def load(cls, settings: Settings) -> Text:
        """The file that was asked for, or the first 2 MiB of the standard library's own modules in alphabetical order.

        Raises:
            DemoError: it cannot be read, or is shorter than one sequence.
        """
        if settings.text is None:
            folder = Path(sysconfig.get_path("stdlib"))
            source = f"sources of Python {sysconfig.get_python_version()}'s standard library"
            content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:TEXT_BYTES]
            cure = f"{folder} holds too few; name a file by --text."
        else:
            source, cure = settings.text.name, "Choose a longer one, or a shorter --sequence-length."
            try:
                content = settings.text.read_bytes()
            except OSError as error:
                raise DemoError(f"--text {settings.text} cannot be read: {error.strerror}.") from error
        if len(content) < settings.sequence_length:
            raise DemoError(
                f"the text has {len(content)} bytes, and one sequence of a batch takes {settings.sequence_length}. {cure}"
            )
        return cls(source, torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def batch(self, settings: Settings, generator: torch.Generator) -> Tensor:
        """[batch_size, sequence_length] int64 on the device: sequences from places drawn by `generator`."""
        first = torch.randint(len(self.data) - settings.sequence_length + 1, (settings.batch_size, 1), generator=generator)
        return self.data[first + torch.arange(settings.sequence_length)].long().to(settings.torch_device)

    def prompt(self) -> bytes:
        """The beginning of a line in the middle of the text."""
        content = bytes(self.data.tolist())
        start = content.find(b"\n", len(content) // 2) + 1
        return content[start : start + 48] or content[:48]
