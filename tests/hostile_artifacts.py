"""Changes of an artifact's plan and code after which its checksums are right and it is not sane.

`edits` are of the plan alone. `consistent_edits` also give the kernel the name that follows from
the changed launch, in its code too, so that only what the launch asks for can give it away.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gtco.codegen.binding import Binding
from gtco.codegen.program import KernelProgram
from gtco.ir.graph import Group, subgraph
from gtco.passes.origins import at_origins
from gtco.runtime.encoding import _decode_argument, decode_graph
from tests.artifact_files import Content

Json = dict[str, Any]
Blobs = dict[str, bytes]


@dataclass(frozen=True)
class Edit:
    """One change.

    Args:
        name: what it does.
        change: of the plan.
        blobs: of the cubins, by part.
        text: of the plan as text.
        metadata: of the header.
    """

    name: str
    change: Callable[[Content], None] = lambda content: None
    blobs: Callable[[Blobs], None] = lambda blobs: None
    text: Callable[[str], str] = lambda text: text
    metadata: Mapping[str, str] = field(default_factory=dict)


def launches(content: Content) -> list[Json]:
    found: list[Json] = content["plan"]["launches"]
    return found


def chosen(content: Content) -> list[int]:
    """The first generated launch of each sketch, and a launch in the middle of the plan."""
    first: dict[str, int] = {}
    for index, launch in enumerate(launches(content)):
        if launch["program"]:
            first.setdefault(launch["program"]["sketch"], index)
    return list(first.values())


def _of_program(name: str, index: int, change: Callable[[Json, Json], object]) -> Edit:
    def apply(content: Content) -> None:
        launch = launches(content)[index]
        change(launch["program"], launch)

    return Edit(f"launch {index}: {name}", apply)


def _fields(program: Json) -> Iterator[tuple[str, Callable[[Json, Json], object]]]:
    """Other numbers in place of a launch's."""

    def put(key: str, value: Any) -> Callable[[Json, Json], object]:
        return lambda p, launch: p.update({key: value})

    grid, cluster = program["grid"], program["cluster"]
    for axis in range(3):
        for name, value in (
            ("doubled", grid[axis] * 2),
            ("zero", 0),
            ("negative", -1),
            ("huge", 2**31),
            ("a fraction", grid[axis] + 0.5),
        ):
            yield f"grid {axis} {name}", put("grid", [*grid[:axis], value, *grid[axis + 1 :]])
    yield "grid of two", put("grid", grid[:2])
    for value in (0, 1, program["block"] - 32, program["block"] + 32, 2048, "256", True):
        yield f"block {value!r}", put("block", value)
    for value in ([2, 1, 1], [1, 2, 1], [0, 1, 1], [-1, -1, 1], [64, 1, 1], [1, 1], [5, 1, 1]):
        if value != cluster:
            yield f"cluster {value}", put("cluster", value)
    for value in (-1, program["used_smem_bytes"] - 16, 228 * 1024, 2**40, 1e5):
        yield f"shared memory {value}", put("smem_bytes", value)
    for value in (-1, program["used_smem_bytes"] + 16, program["smem_bytes"] + 1):
        yield f"used shared memory {value}", put("used_smem_bytes", value)
    yield "another architecture", put("arch", "sm_86")
    yield "another binding", put("binding", "0" * 16)
    yield "no binding", put("binding", "")


def _arguments(
    program: Json, content: Content
) -> Iterator[tuple[str, Callable[[Json, Json], object]]]:
    """Other arguments, and the same ones elsewhere."""
    count = len(program["arguments"])
    constants = [each["name"] for each in content["plan"]["graph"]["constants"]]
    inputs = [each["name"] for each in content["plan"]["graph"]["inputs"]]
    yield "an argument less", lambda p, launch: p["arguments"].pop()
    yield "an argument twice", lambda p, launch: p["arguments"].append(p["arguments"][-1])
    yield "no arguments", lambda p, launch: p.update(arguments=[])
    yield "arguments backwards", lambda p, launch: p["arguments"].reverse()
    for at in range(count):

        def aim(p: Json, launch: Json, value: str, at: int = at) -> None:
            argument = p["arguments"][at]
            argument.update({"pointer" if "pointer" in argument else "tensor_map": value})

        own = program["arguments"][at]
        value = own.get("pointer", own.get("tensor_map"))
        others = [a.get("pointer", a.get("tensor_map")) for a in program["arguments"]]
        for what, other in (
            ("a constant", next(name for name in constants if name != value)),
            ("an input", next((name for name in inputs if name != value), constants[-1])),
            ("the next argument", others[(at + 1) % count]),
            ("the output", others[-1]),
        ):
            if other != value:
                yield (
                    f"argument {at} aims at {what}",
                    (lambda p, launch, aim=aim, other=other: aim(p, launch, other)),
                )
        for further in (-16, 4, own["origin"] + 16, 2**40):
            yield (
                f"argument {at} from {further} bytes on",
                (
                    lambda p, launch, at=at, further=further: p["arguments"][at].update(
                        origin=further
                    )
                ),
            )
        if "tensor_map" in own:
            yield (
                f"argument {at} a pointer",
                (
                    lambda p, launch, at=at, value=value: p["arguments"].__setitem__(
                        at, {"pointer": value, "origin": 0}
                    )
                ),
            )
            yield from _maps(at, own)


def _maps(at: int, own: Json) -> Iterator[tuple[str, Callable[[Json, Json], object]]]:
    def put(key: str, value: Any) -> Callable[[Json, Json], object]:
        return lambda p, launch: p["arguments"][at].update({key: value})

    for value in (-8, 4, own["offset"] + 8, 2**40):
        yield f"map {at} from {value}", put("offset", value)
    for key in ("sizes", "strides", "box"):
        for axis, size in enumerate(own[key]):
            for value in (size * 2, -size, 2**40):
                changed = [*own[key][:axis], value, *own[key][axis + 1 :]]
                yield f"map {at} {key} {axis} {value}", put(key, changed)
    for value in (own["swizzle_bytes"] // 2 or 32, 48, -1):
        yield f"map {at} swizzle {value}", put("swizzle_bytes", value)
    yield f"map {at} of another type", put("dtype", "f32")
    yield f"map {at} of integers", put("dtype", "i64")


def _whole_plan(content: Content) -> Iterator[Edit]:
    last = len(launches(content)) - 1
    constant = content["plan"]["graph"]["constants"][0]["name"]

    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    yield Edit("a launch twice", lambda c: launches(c).append(copy.deepcopy(launches(c)[last])))
    yield Edit("a launch twice at once", lambda c: launches(c).insert(1, launches(c)[1]))
    yield Edit("a launch less", lambda c: launches(c).pop(1))
    yield Edit("no launches", lambda c: launches(c).clear())
    yield Edit("two launches exchanged", lambda c: launches(c).insert(1, launches(c).pop(2)))
    yield Edit("backwards", lambda c: launches(c).reverse())
    for index in chosen(content):
        yield Edit(
            f"launch {index} stores nothing", lambda c, i=index: launches(c)[i].update(outputs=[])
        )
        yield Edit(
            f"launch {index} stores a constant",
            lambda c, i=index: launches(c)[i].update(outputs=[constant]),
        )
        yield Edit(
            f"launch {index} stores twice",
            lambda c, i=index: launches(c)[i]["outputs"].append(launches(c)[i]["outputs"][0]),
        )
        yield Edit(
            f"launch {index} of no nodes", lambda c, i=index: launches(c)[i].update(nodes=[])
        )
        yield Edit(
            f"launch {index} of another's nodes",
            lambda c, i=index: launches(c)[i].update(nodes=launches(c)[(i + 1) % last]["nodes"]),
        )
        yield Edit(
            f"launch {index} of another's kernel",
            lambda c, i=index: launches(c)[i].update(program=launches(c)[i + 1]["program"]),
        )
    for name, value in (("NaN", float("nan")), ("below 0", -1.0), ("a truth", True)):
        yield Edit(f"a time {name}", lambda c, v=value: launches(c)[0].update(predicted_us=v))
    for key in ("plan", "signature", "kernels", "gtco_version"):
        yield Edit(f"no {key}", lambda c, k=key: c.pop(k))
        yield Edit(
            f"{key} nested",
            lambda c, k=key: c.update({k: "@"}),
            text=lambda text: text.replace('"@"', nested(100_000)),
        )
    yield Edit(
        "an attribute nested",
        lambda c: c["plan"]["graph"]["nodes"][0]["attrs"].update(dim="@"),
        text=lambda text: text.replace('"@"', nested(900)),
    )
    yield Edit("checksums nested", metadata={"sha256": nested(100_000)})
    yield Edit("dependent launch of a text", lambda c: c["plan"].update(dependent_launch="no"))
    for size in (-1, 2**40, 2**63, 2**80, True, 1.5):
        yield Edit(
            f"a constant of {size}",
            lambda c, n=size: c["plan"]["graph"]["constants"][0].update(shape=[n]),
        )
        yield Edit(
            f"an input of {size}",
            lambda c, n=size: c["plan"]["graph"]["inputs"][0].update(shape=[n]),
        )
    yield Edit(
        "a constant without data", lambda c: c["plan"]["graph"]["constants"][0].update(part=None)
    )
    yield Edit("two constants exchanged", _exchange_constants)
    yield Edit("an ATen call on the CPU", _allocate)
    for attribute in ("eps", "scale"):
        yield Edit(f"another {attribute}", lambda c, a=attribute: _change_attribute(c, a))


def _exchange_constants(content: Content) -> None:
    constants = content["plan"]["graph"]["constants"]
    for index, each in enumerate(constants):
        for other in constants[index + 1 :]:
            if (each["shape"], each["dtype"]) == (other["shape"], other["dtype"]):
                each["part"], other["part"] = other["part"], each["part"]
                return
    raise AssertionError("no two constants are alike")


def _allocate(content: Content) -> None:
    """A node that makes a terabyte on the CPU if its shape is asked for carelessly."""
    node = content["plan"]["graph"]["nodes"][0]
    node.update(
        op="aten",
        inputs=[],
        attrs={
            "target": "aten.full.default",
            "args": [[2**38], 1.0],
            "kwargs": [["device", {"device": "cpu"}]],
        },
    )


def _change_attribute(content: Content, name: str) -> None:
    """Of a node that a kernel computes, or of nothing: then the edit is none."""
    for node in content["plan"]["graph"]["nodes"]:
        if isinstance(node["attrs"].get(name), float):
            node["attrs"][name] *= 2
            return
    content["plan"]["options"]["static_outputs"] = "yes"


def _code(content: Content) -> Iterator[Edit]:
    names = [f"cubins.{each['name']}" for each in content["kernels"]]
    first, second = names[0], names[1]

    def exchange(blobs: Blobs) -> None:
        blobs[first], blobs[second] = blobs[second], blobs[first]

    def put(data: Callable[[bytes], bytes]) -> Callable[[Blobs], None]:
        return lambda blobs: blobs.update({first: data(blobs[first])})

    yield Edit("two cubins exchanged", blobs=exchange)
    yield Edit("a cubin of another kernel", blobs=lambda b: b.update({first: b[second]}))
    yield Edit("an empty cubin", blobs=put(lambda data: b""))
    yield Edit("a cubin cut short", blobs=put(lambda data: data[: len(data) // 2]))
    yield Edit("a cubin without its tables", blobs=put(lambda data: data[:64]))
    yield Edit("a cubin of zeros", blobs=put(lambda data: bytes(len(data))))
    yield Edit("code for the CPU", blobs=put(lambda data: data[:18] + b"\x3e\0" + data[20:]))
    yield Edit("code for another GPU", blobs=put(lambda data: data[:49] + b"\x32" + data[50:]))
    yield Edit(
        "sections beyond the file", blobs=put(lambda data: data[:40] + b"\xff" * 8 + data[48:])
    )
    for key, value in (
        ("registers", 7), ("smem_bytes", 64), ("registers", "many"), ("log", None),
        ("arch", "sm_86"), ("name", "gtco_gemm_000000000000"), ("spill_bytes", -1),
        ("local_bytes", 0.5),
    ):  # fmt: skip
        yield Edit(
            f"a kernel with {key} {value}",
            lambda c, k=key, v=value: c["kernels"][0].update({k: v}),
        )
    yield Edit("a kernel less", lambda c: c["kernels"].pop(0))
    yield Edit("a kernel twice", lambda c: c["kernels"].append(c["kernels"][0]))


def edits(content: Content) -> Iterator[Edit]:
    """Changes of the plan, or of the code, alone."""
    for index in chosen(content):
        program = launches(content)[index]["program"]
        for name, change in (*_fields(program), *_arguments(program, content)):
            yield _of_program(name, index, change)
    yield from _whole_plan(content)
    yield from _code(content)


# -- with names that follow ------------------------------------------------------------------------


def consistent_edits(content: Content) -> Iterator[tuple[Edit, str]]:
    """Changes of a launch whose kernel is named after them, and what the refusal says."""
    for index in chosen(content):
        program = launches(content)[index]["program"]
        source = content["plan"]["sources"][program["kernel"]]
        cases: list[tuple[str, Callable[[Json], object], str]] = [
            (
                "fetches beyond what it is given",
                lambda p: p.update(fetch_bytes=1 << 40),
                "the kernel fetches 1099511627776 bytes" if program["fetch_bytes"] else "arguments",
            ),
            ("no blocks", lambda p: p.update(grid=[0, 1, 1]), "0 blocks along x"),
            ("too many blocks", lambda p: p.update(grid=[1, 65536, 1]), "65536 blocks along y"),
            ("too many threads", lambda p: p.update(block=1024 + 32), "threads a block"),
            (
                "too wide a cluster",
                lambda p: p.update(grid=[32, 1, 1], cluster=[32, 1, 1]),
                "a cluster",
            ),
            (
                "an odd cluster",
                lambda p: p.update(grid=[7, 1, 1], cluster=[2, 1, 1]),
                "do not fill|has no clusters",
            ),
            (
                "too much shared memory",
                lambda p: p.update(smem_bytes=228 * 1024, used_smem_bytes=228 * 1024),
                "B a block",
            ),
            (
                "less than it uses",
                lambda p: p.update(smem_bytes=0, used_smem_bytes=1),
                "the kernel uses",
            ),
            ("an argument less", lambda p: p["arguments"].pop(), "arguments, the kernel has"),
        ]
        if program["cluster"] != [1, 1, 1]:
            cases = [case for case in cases if "cluster" not in case[0]]
        for at, argument in enumerate(program["arguments"]):
            if "tensor_map" not in argument:
                continue
            for name, key, value, words in (
                ("far off", "offset", 2**30, "reaches beyond"),
                ("askew", "offset", 4, "begin and step by 16"),
                (
                    "long",
                    "sizes",
                    [argument["sizes"][0], 2**20, *argument["sizes"][2:]],
                    "reaches beyond",
                ),
                ("wide", "box", [512, *argument["box"][1:]], "a box of"),
                ("twisted", "swizzle_bytes", 48, "a swizzle of 48"),
                ("of floats", "dtype", "f32", "a tensor map of torch.float32"),
                ("of floats as they are", "dtype", "i32", "a tensor map of torch.int32"),
            ):
                cases.append(
                    (
                        f"map {at} {name}",
                        lambda p, at=at, key=key, value=value: p["arguments"][at].update(
                            {key: value}
                        ),
                        words,
                    )
                )
        constant = content["plan"]["graph"]["constants"][-1]["name"]
        cases.append(
            (
                "a store to a constant",
                lambda p, s=source, v=constant: _aim_store(p, s, v),
                "the kernel stores",
            ),
        )
        for name, change, words in cases:
            yield _renamed(f"launch {index}: {name}", content, index, change), words


def _aim_store(program: Json, source: str, value: str) -> None:
    """Let the first store go to `value`."""
    parameters = re.findall(r"ENTRY_POINT\((.*?)\) \{", source, re.DOTALL)[0].split(",")
    at = next(i for i, text in enumerate(parameters) if not text.strip().startswith("const "))
    program["arguments"][at] = {"pointer": value, "origin": 0}


def _renamed(name: str, content: Content, index: int, change: Callable[[Json], object]) -> Edit:
    """The edit of launch `index` alone, as a kernel of its own name."""
    data = copy.deepcopy(launches(content)[index])
    program, old = data["program"], data["program"]["kernel"]
    source = content["plan"]["sources"][old]
    change(program)
    plan = content["plan"]
    stripped = {
        **plan["graph"],
        "constants": [{**e, "part": None} for e in plan["graph"]["constants"]],
    }
    graph = decode_graph(stripped, {})
    nodes = [node for node in graph.nodes if node.name in data["nodes"]]
    group = Group(data["group"], subgraph(graph, nodes, data["outputs"]))
    new = _follow(program, source, group)

    def rename(edited: Content) -> None:
        launches(edited)[index]["program"] = program
        edited["plan"]["sources"][new] = source
        info = next(each for each in edited["kernels"] if each["name"] == old)
        if any(each["program"] and each["program"]["kernel"] == old for each in launches(edited)):
            edited["kernels"].append({**info, "name": new})
        else:
            info["name"] = new

    def patch(blobs: Blobs) -> None:
        blobs[f"cubins.{new}"] = blobs[f"cubins.{old}"].replace(old.encode(), new.encode())
        others = [each["program"] for i, each in enumerate(launches(content)) if i != index]
        if not any(each and each["kernel"] == old for each in others):
            del blobs[f"cubins.{old}"]

    return Edit(name, rename, patch)


def _follow(program: Json, source: str, group: Group) -> str:
    """Give `program` the binding and the name that follow from it, and return the name."""
    made = KernelProgram(
        program["family"],
        program["sketch"],
        program["schedule"],
        source,
        program["arch"],
        tuple(program["grid"]),
        program["block"],
        program["smem_bytes"],
        tuple(_decode_argument(each) for each in program["arguments"]),
        tuple(program["cluster"]),
        program["used_smem_bytes"],
        fetch_bytes=program["fetch_bytes"],
        late_trigger=program["late_trigger"],
        backward=program["backward"],
    )
    made = replace(made, binding=Binding(at_origins(group.graph)[0]).digest(made.arguments))
    program.update(kernel=made.name, binding=made.binding)
    return made.name
