# SPDX-License-Identifier: Apache-2.0
"""Hot swaps of a plain `torch.nn.Module`: a loader and a quantised layer of your own, no vLLM.

    python examples/plain_module.py

`Int8Linear` receives a float weight and, after the load, keeps an int8 one and drops the other: what most quantised
layers do. Loading into it a second time would find no `weight` to write to. `load` is the loader that one writes on a
Sunday afternoon. `wrap_loader` makes each call of it one session: the layers go back to what the constructor made,
everything is received, checked for completeness, processed once, and put into the memory that the layers had before.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import nn

import weightlife

Weights = Iterable[tuple[str, torch.Tensor]]


class Int8Linear(nn.Module):
    """A linear layer whose weight is quantised after the load, by row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        """Quantise, and drop the float weight. weightlife calls this; a loader must not."""
        scale = self.weight.abs().amax(dim=1).clamp(min=1e-8) / 127
        self.quantised = nn.Parameter(
            (self.weight / scale[:, None]).round().to(torch.int8), requires_grad=False
        )
        self.scale = scale
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (n, inputs) to (n, outputs)."""
        return x @ (self.quantised.float() * self.scale[:, None]).t() + self.bias


class Net(nn.Module):
    """Two quantised layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Int8Linear(8, 32)
        self.down = Int8Linear(32, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (n, 8) to (n, 8)."""
        out: torch.Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return out


@weightlife.wrap_loader(partial_update="forbid")  # what arrives in parts serves when all of it is there
def load(model: nn.Module, weights: Weights) -> None:
    """A whole checkpoint."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].data.copy_(tensor)


@weightlife.wrap_loader(chunked=True)
def push(model: nn.Module, weights: Weights) -> None:
    """A part of one, as a trainer sends it; the next forward pass is the end."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].data.copy_(tensor)


def checkpoint(seed: int) -> list[tuple[str, torch.Tensor]]:
    """A random checkpoint of `Net`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in Net().named_parameters()}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def check(what: str, held: bool) -> None:
    """Print one line, and stop where something did not hold."""
    print(f"{'yes' if held else 'NO '}  {what}")
    if not held:
        raise SystemExit(1)


def main() -> None:
    a, b, x = checkpoint(1), checkpoint(2), torch.randn(4, 8)
    want = {}
    for name, weights in (("a", a), ("b", b)):
        cold = Net()
        load(cold, weights)
        want[name] = cold(x)

    model = Net()
    load(model, a)
    check("the first load answers as A", torch.equal(model(x), want["a"]))
    address = model.up.quantised.data_ptr()

    load(model, b)
    check("after a hot swap it answers as B, exactly", torch.equal(model(x), want["b"]))
    check("the quantised weight is where it was", model.up.quantised.data_ptr() == address)

    try:
        load(model, a[:-1])
    except weightlife.errors.MissingTensorError as error:
        check(f"an update without {a[-1][0]} is refused by name", a[-1][0] in error.tensors)
    check("and B still answers, exactly", torch.equal(model(x), want["b"]))

    for chunk in (a[:3], a[3:5]):
        push(model, chunk)
        check("while A arrives in chunks, B answers", torch.equal(model(x), want["b"]))
    push(model, a[5:])
    check("with the last chunk it answers as A", torch.equal(model(x), want["a"]))

    with weightlife.session(model, source="the demo"):
        push(model, b[:2])
        push(model, b[2:])
        check("inside an explicit session A answers", torch.equal(model(x), want["a"]))
    check("after it, B", torch.equal(model(x), want["b"]))

    with TemporaryDirectory() as folder:
        save_file(dict(a[:3]), f"{folder}/model-1.safetensors")
        save_file(dict(a[3:]), f"{folder}/model-2.safetensors")
        load(model, weightlife.read_safetensors(folder))
        check("a folder of safetensors files is a source, too", torch.equal(model(x), want["a"]))
        check("verify finds it bit by bit", weightlife.verify(model, folder).ok)
        whole = Path(folder, "model-2.safetensors").read_bytes()
        Path(folder, "model-2.safetensors").write_bytes(whole[:-1])
        try:
            weightlife.load(model, folder)  # by the same loader
        except weightlife.errors.TruncatedSourceError:
            check("a file that is cut off is refused, and A answers", torch.equal(model(x), want["a"]))
    print(weightlife.last_report(model))


if __name__ == "__main__":
    main()
