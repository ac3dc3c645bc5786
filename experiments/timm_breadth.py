"""How much of timm gtco takes: a small member of each of 41 transformer-like families.

    python -m experiments.timm_breadth OUT.json [FAMILY...]

Each is captured in fp16, fused and planned for sm_90a, which needs no GPU; the rewritten graph,
interpreted in fp64, may be off from the module in fp64 as far as the module in fp32 is (some are
chaotic with random weights). A family that fails is written with its error. OUT.json holds the
distinct operators, the failures and what runs with ATen and why.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from experiments.models.transformers_zoo import randomize
from experiments.publish import provenance
from gtco import compiler
from gtco.check import judge
from gtco.frontend.torch_export import capture
from gtco.ir.interpreter import interpret
from gtco.options import Options
from gtco.passes import run_pipeline

FAMILIES = {
    "beit": "beit_base_patch16_224",
    "cait": "cait_xxs24_224",
    "coat": "coat_tiny",
    "convit": "convit_tiny",
    "convnext": "convnext_atto",
    "crossvit": "crossvit_tiny_240",
    "davit": "davit_tiny",
    "deit": "deit_tiny_distilled_patch16_224",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "eva02_tiny_patch14_224",
    "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "hiera": "hiera_tiny_224",
    "levit": "levit_128s",
    "maxxvit": "maxvit_tiny_tf_224",
    "metaformer": "poolformer_s12",
    "mlp_mixer": "mixer_s32_224",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "pit": "pit_ti_224",
    "pvt_v2": "pvt_v2_b0",
    "repvit": "repvit_m0_9",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_legacy_patch16_224",
    "twins": "twins_pcpvt_small",
    "visformer": "visformer_tiny",
    "vision_transformer": "vit_tiny_patch16_224",
    "vision_transformer_relpos": "vit_relpos_small_patch16_224",
    "volo": "volo_d1_224",
    "xcit": "xcit_nano_12_p16_224",
}
"""A timm module and the model of it that is tried."""


def examine(name: str) -> dict[str, Any]:
    """What becomes of timm's model `name`."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False).eval()
    randomize(model)
    image = torch.randn(1, *model.pretrained_cfg["input_size"])
    with torch.no_grad():
        single = capture(model, (image,))
        found = interpret(run_pipeline(single.graph), (image,), dtype=torch.float64)
        eager = model(image)
        exact = copy.deepcopy(model).double()(image.double())
    verdict = judge([each.float() for each in found], [eager], [exact], torch.float32)
    started = time.perf_counter()
    options = Options.of(target="sm_90a")
    plan, captured = compiler.make_plan(model.half(), (image.half(),), None, options)
    planned_s = time.perf_counter() - started
    aten = Counter(
        (" -> ".join(node.attrs.get("target", node.op) for node in launch.group.compute),
         launch.source, launch.reason)
        for launch in plan.launches if launch.program is None
    )  # fmt: skip
    parts = Counter(node.op for launch in plan.launches for node in launch.group.compute)
    return {
        "operators": sorted(
            {str(node.attrs.get("target", node.op)) for node in captured.graph.nodes}
        ),
        "launches": len(plan.launches),
        "generated": sum(launch.program is not None for launch in plan.launches),
        "attention": parts["attention"],
        "softmax": parts["softmax"],
        "aten": [
            {"operators": operators, "source": source, "reason": reason, "launches": count}
            for (operators, source, reason), count in aten.most_common()
        ],
        "verdict": verdict.to_dict(),
        "capture_to_plan_s": planned_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for family in given.families:
        name = FAMILIES[family]
        try:
            found[family] = {"model": name, **examine(name)}
        except Exception as error:
            found[family] = {"model": name, "error": f"{type(error).__name__}: {error}"}
        print(family, _summary(found[family]), flush=True)
        operators = sorted({op for each in found.values() for op in each.get("operators", ())})
        failures = {name: each["error"] for name, each in found.items() if "error" in each}
        wrong = [
            name for name, each in found.items() if not each.get("verdict", {}).get("ok", True)
        ]
        result = {
            "distinct_operators": operators,
            "failures": failures,
            "wrong": wrong,
            "families": found,
            **provenance("timm_breadth"),
        }
        given.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(f"{len(operators)} distinct operators, {len(failures)} failures, {len(wrong)} wrong")


def _summary(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])[:300]
    aten = ", ".join(f"{each['launches']} {each['operators']}" for each in found["aten"])
    return (
        f"{found['launches']} launches, {found['generated']} generated; ATen: {aten or 'none'}; "
        f"{'right' if found['verdict']['ok'] else 'WRONG'}; {found['capture_to_plan_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
