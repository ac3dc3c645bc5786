"""`gtco demo`: a ViT-B/16 in plain torch, taken the whole way that a user's model takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gtco
from gtco.check import Verdict, judge
from gtco.locate import Located
from gtco.runtime.host import find_compiler
from gtco.runtime.infos import KernelInfo
from gtco.runtime.module import CompiledModule

NAME = "ViT-B/16"
TARGET = "sm_90a"
"""What the demo compiles for where no GPU is."""


class DemoFailed(RuntimeError):
    """What the demo computed is wrong."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(x.reshape(batch, tokens, width))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(image).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """timm's `vit_*_patch*_224`: the same arithmetic and the same names of weights.

    The defaults are ViT-B/16. With no classes there is no head: features of the class token.
    """

    def __init__(
        self,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        image: int = 224,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(patch, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes) if classes else nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])  # type: ignore[no-any-return]


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Give every parameter a seeded random value of a trained model's size, where it lies.

    Biases and norms as well: at their initial zeros and ones, a kernel that left them out would
    be right.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.normal_(center, 0.02, generator=generator)


def vit_b16(dtype: torch.dtype = torch.float16) -> Located:
    """The demo's model and one image, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):  # values are set once
        model = VisionTransformer().eval()
    randomize(model.to_empty(device=device), seed=0)
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    return Located(NAME, model.to(dtype), (image.to(device, dtype),), {})


# -- without a GPU -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsal:
    """What can be known of a model without a GPU.

    Args:
        compiled: for `TARGET`, in fp16.
        kernels: its compiled kernels.
        verdict: on the fused graph, interpreted in fp32.
        on_host: on the generated kernels of a small ViT, run on the CPU; None without a C++
            compiler.
    """

    compiled: CompiledModule
    kernels: tuple[KernelInfo, ...]
    verdict: Verdict
    on_host: Verdict | None


def rehearse(tell: Callable[[str], None] = lambda message: None) -> Rehearsal:
    """Compile the demo's model for `TARGET` and check its fused graph on the CPU."""
    half, single = vit_b16(), vit_b16(torch.float32)
    with torch.no_grad():
        tell(f"capturing and fusing {NAME} in fp16 for {TARGET}")
        compiled = gtco.compile(half.module, half.args, target=TARGET)
        tell("compiling its kernels")
        kernels = compiled.kernels
        tell("running the fused graph in fp32 beside torch eager")
        verdict = check_fused(single)
        if find_compiler() is not None:
            tell("running the kernels of a ViT of two layers on the CPU")
        on_host = check_on_host()
    return Rehearsal(compiled, kernels, verdict, on_host)


def check_on_host() -> Verdict | None:
    """Judge the generated kernels of a ViT of two layers, run on the CPU, in fp16.

    None where no C++ compiler is found.
    """
    if find_compiler() is None:
        return None
    model = VisionTransformer(patch=4, width=64, depth=2, heads=4, image=16, classes=10)
    randomize(model, seed=0)
    half = copy.deepcopy(model).half().eval()
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)).half()
    compiled = gtco.compile(half, (image,), target="host")
    exact = half.double()(image.double())
    return judge(compiled(image), model.half().eval()(image), exact, torch.float16)


def check_fused(model: Located) -> Verdict:
    """Judge the fused graph of an fp32 model against eager, with fp64 as the reference."""
    fused = gtco.fuse(gtco.capture(model.module, model.args), target=TARGET)
    (ours,) = gtco.interpret(fused, model.args)
    eager = model.module(*model.args)
    exact = copy.deepcopy(model.module).double()
    reference = exact(*(arg.double() for arg in model.args))
    return judge(ours, eager, reference, torch.float32)
