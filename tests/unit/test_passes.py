"""The rewriting driver, and each pass by meaning, by form (golden files) and by what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.frontend.torch_export import capture
from gtco.ir.graph import GraphBuilder, Node
from gtco.ir.interpreter import interpret
from gtco.ir.spec import GraphError, TensorSpec
from gtco.passes import run_pipeline
from gtco.passes.canonicalize import canonicalize
from gtco.passes.convolutions import fold_convolutions
from gtco.passes.fold_constants import fold_constants
from gtco.passes.horizontal import join_siblings
from gtco.passes.precision import lower_precision, lower_products
from gtco.passes.rewrite import DECLINED, Editor, Log, Rule, rewrite
from gtco.passes.slices import push_slices
from gtco.passes.views import groups
from tests import models
from tests.pass_checks import Golden, captured, check, ops, random, reasons

TWO = (random(2, 3), random(2, 3, seed=1))

# -- the driver ----------------------------------------------------------------------------------


def test_the_driver_refuses_rules_that_do_not_end() -> None:
    def again(edit: Editor, node: Node) -> str:
        return edit.add("neg", node.inputs[0])

    rule = Rule("neg(x) -> neg(x)", ("neg",), lambda edit, node: node, again)
    graph, _ = captured(lambda c, x: -x, random(3))
    with pytest.raises(GraphError, match="do not come to an end"):
        rewrite(graph, (rule,))


def test_a_rule_whose_replacement_has_another_shape_declines() -> None:
    rule = Rule("sum(x) -> x", ("sum",), lambda edit, node: node, lambda edit, n: n.inputs[0])
    graph, _ = captured(lambda c, x: x.sum(0), random(3))
    log = Log()
    assert str(rewrite(graph, (rule,), log)) == str(graph)
    (refusal,) = log.refusals
    assert (refusal.rule, refusal.node) == ("sum(x) -> x", "sum")
    assert refusal.reason.startswith(DECLINED) and "cannot become" in refusal.reason
    assert not log.applied


def test_a_rule_that_raises_half_way_leaves_the_graph_as_it_was() -> None:
    """Nodes, constants, names, readers and outputs: everything that an editor may change."""

    def half(edit: Editor, node: Node) -> str:
        zero = edit.add_constant("zero", torch.zeros(3))
        for user in edit.users(node.name):
            edit.replace(user.name, edit.add("exp", edit.add("add", user.name, zero)))
        edit.replace(node.name, node.inputs[0])
        raise RuntimeError("in the middle\nand more")

    def on(edit: Editor, node: Node) -> Node | None:
        return node if node.op == "neg" else None

    broken = Rule("neg(x) -> x", ("neg",), on, half)
    name = Rule("relu(x) -> abs(x)", ("relu",), lambda edit, node: node,
                lambda edit, node: edit.add("exp", edit.add("abs", node.inputs[0])))  # fmt: skip
    builder = GraphBuilder()
    x = builder.input("x", TensorSpec((3,), torch.float32))
    y = builder.add("neg", x)
    graph = builder.build([builder.add("relu", y), y, builder.add("tanh", y)])
    log = Log()
    result = rewrite(graph, (broken, name), log)
    assert str(result) == str(rewrite(graph, (name,)))
    result.verify()
    assert [refusal.reason for refusal in log.refusals] == [
        f"{DECLINED}: RuntimeError: in the middle"
    ]


def test_a_declined_rule_is_tried_again_where_its_neighbourhood_changes_alone() -> None:
    tried: list[str] = []

    def fails(edit: Editor, node: Node) -> str:
        tried.append(node.name)
        edit.add("exp", node.inputs[0])
        raise RuntimeError

    rules = (
        Rule("neg(x) -> nothing", ("neg",), lambda edit, node: node, fails),
        Rule("relu(x) -> abs(x)", ("relu",), lambda edit, node: node,
             lambda edit, node: edit.add("abs", node.inputs[0])),
    )  # fmt: skip
    graph, _ = captured(lambda c, x: (-x).relu().exp().neg(), random(3))
    rewrite(graph, rules)
    assert tried == ["neg", "neg_1", "neg"]


def test_a_matching_function_that_raises_is_a_refusal() -> None:
    rule = Rule("sum(x) -> x", ("sum",), lambda edit, node: node.attrs["no such"], lambda e, n: n)
    graph, _ = captured(lambda c, x: x.sum(0), random(3))
    log = Log()
    rewrite(graph, (rule,), log)
    assert "KeyError" in reasons(log)


def test_dead_nodes_go() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorSpec((4,), torch.float32))
    builder.add("exp", builder.add("neg", x))
    graph = rewrite(builder.build([builder.add("relu", x)]), ())
    assert [node.op for node in graph.nodes] == ["relu"]


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ((2, 14, 14), (2, 196), [([0], [0]), ([1, 2], [1])]),
        ((196, 768), (14, 14, 768), [([0], [0, 1]), ([1], [2])]),
        ((4, 6), (1, 3, 8, 1), [([], [0]), ([0, 1], [1, 2, 3])]),
        ((5,), (5,), [([0], [0])]),
    ],
)
def test_groups(before: tuple[int, ...], after: tuple[int, ...], expected: object) -> None:
    assert groups(before, after) == expected


# -- canonicalize --------------------------------------------------------------------------------


def test_canonicalize_views(golden: Golden) -> None:
    def function(c: nn.Module, x: Tensor) -> Tensor:
        y = x.reshape(2, 12, 5).reshape(2, 3, 4, 5).permute(0, 3, 1, 2).permute(0, 2, 3, 1)
        y = (y * 1 - 0).transpose(1, 2).relu().transpose(1, 2)[:, :, 1:4][:, :, 1:]
        return (y.float().double() + y.contiguous()) / c.two

    graph, args = captured(function, random(2, 3, 20, dtype=torch.float32), two=torch.tensor(2.0))
    golden("passes/canonicalize_views.txt", check(canonicalize, graph, args))


def test_windows_that_lie_side_by_side_are_a_reshape() -> None:
    """A chain of them can then be stored through; others stay what they are."""

    def function(c: nn.Module, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2).unfold(2, 2, 2).unfold(3, 3, 3).reshape(2, 5, 6, 6).relu()

    result = check(canonicalize, *captured(function, random(2, 4, 9, 5)))
    assert not any(node.op == "unfold" for node in result.nodes)
    for size, step in ((2, 2), (2, 1), (1, 2), (3, 4)):
        graph, args = captured(lambda c, x, n=size, by=step: x.unfold(1, n, by), random(3, 7, 4))
        assert any(node.op == "unfold" for node in check(canonicalize, graph, args).nodes)


def test_an_operand_that_is_broadcast_anyway_is_not_expanded_first() -> None:
    def function(c: nn.Module, x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True).expand_as(x)  # needless
        rows = c.row.expand(2, 3, 4, 5)  # of more dimensions than x / norm has
        return torch.where(x > 0, x / norm, norm) + rows

    graph, args = captured(function, random(3, 4, 5), row=random(5))
    result = check(canonicalize, graph, args)
    expanded = [node.outputs[0].sizes for node in result.nodes if node.op == "expand"]
    assert expanded == [(2, 3, 4, 5)]


def test_a_concat_leaves_out_what_is_empty() -> None:
    graph, args = captured(lambda c, x, y: torch.cat([x[:0], x, y, y[2:]]), *TWO)
    result = check(canonicalize, graph, args)
    (concat,) = (node for node in result.nodes if node.op == "concat")
    assert len(concat.inputs) == 2


def test_canonicalize_matmul_with_a_constant() -> None:
    graph, args = captured(
        lambda c, x: x @ c.w @ c.v.T, random(2, 3, 4), w=random(4, 6), v=random(5, 6, seed=1)
    )
    result = check(canonicalize, graph, args)
    assert ops(result) == {"linear": 2}
    assert result.constants["v"].data_ptr() == graph.constants["v"].data_ptr()


def test_a_constant_of_one_element_is_a_number() -> None:
    graph, args = captured(
        lambda c, x: (x * c.a + c.b) / c.wide, random(2, 3, dtype=torch.float32),
        a=torch.tensor([2.0]), b=torch.full((1, 1), 3.0), wide=torch.full((1, 1, 1), 2.0),
    )  # fmt: skip
    result = check(canonicalize, graph, args)
    assert list(result.constants) == ["wide"]  # it makes the result wider by a dimension


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda c, x: x @ c.w + c.b, {"linear": 1}),
        (lambda c, x: c.b[None, None] + x @ c.w, {"linear": 1}),
        (lambda c, x: x @ c.w + c.b[:, None], {"linear": 1, "add": 1}),
        (lambda c, x: x @ c.w + c.b + c.b, {"linear": 1, "add": 1}),
        (lambda c, x: (y := x @ c.w) + c.b + y.exp(), {"linear": 1, "add": 2, "exp": 1}),
        (lambda c, x: x @ c.w + c.b.view(1, 1, 1, 4), {"linear": 1, "add": 1}),
    ],
)
def test_a_row_added_to_a_linear_is_its_bias(
    function: Callable[..., Tensor], expected: dict[str, int]
) -> None:
    graph, args = captured(function, random(2, 4, 3), w=random(3, 4), b=random(4, seed=1))
    result = check(canonicalize, fold_constants(graph), args)
    assert ops(result) == expected


# -- convolutions --------------------------------------------------------------------------------


class ConvNorm(nn.Module):
    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.shared = shared
        models.randomize_batch_norm(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.norm(y)
        return z + y if self.shared else z


def test_batch_norm_goes_into_the_convolution(golden: Golden) -> None:
    image = random(1, 3, 8, 8, dtype=torch.float32)
    graph = capture(ConvNorm().eval(), (image,)).graph
    golden("passes/conv_batch_norm.txt", check(fold_convolutions, graph, (image,)))


def test_a_shared_convolution_keeps_its_batch_norm_apart() -> None:
    image, log = random(1, 3, 8, 8, dtype=torch.float32), Log()
    graph = capture(ConvNorm(shared=True).eval(), (image,)).graph
    result = check(fold_convolutions, graph, (image,), log)
    assert ops(result) == {"conv2d": 1, "mul": 1, "add": 2}
    assert "is also read by something other than %batch_norm" in reasons(log)


def test_factors_per_channel_go_into_the_convolution() -> None:
    graph, args = captured(
        lambda c, x: F.conv2d(x, c.w, None, padding=1) * c.s + c.t,
        random(1, 3, 8, 8), w=random(4, 3, 3, 3), s=random(1, 4, 1, 1), t=random(4, 1, 1),
    )  # fmt: skip
    assert ops(check(fold_convolutions, graph, args)) == {"conv2d": 1}


NORMS: dict[str, Callable[..., Tensor]] = {
    "as Keras writes it": lambda c, y: (y - c.m) * c.s + c.t,
    "from a number for each channel": lambda c, y: c.m - y,
    "of whole shapes": lambda c, y: (y - c.m.expand(1, 1, 1, -1)) * c.s.view(1, 1, -1),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_factors_behind_a_permute_go_into_the_convolution(norm: str, last: bool) -> None:
    """Models of images with their channels last turn them around each convolution."""

    def run(c: nn.Module, x: Tensor) -> Tensor:
        y = F.conv2d(x, c.w, None, padding=1).permute(0, 2, 3, 1)
        if last:
            return NORMS[norm](c, y).relu()
        y = y.permute(0, 3, 1, 2)
        turned = nn.Module()
        for name in "mst":
            setattr(turned, name, getattr(c, name)[:, None, None])
        if norm != "of whole shapes":
            y = NORMS[norm](turned, y)
        return y.relu()

    vectors = {name: random(4, seed=seed) for seed, name in enumerate("mst")}
    graph, args = captured(run, random(1, 3, 8, 4), w=random(4, 3, 3, 3), **vectors)
    assert ops(check(fold_convolutions, fold_constants(graph), args)) == {"conv2d": 1, "relu": 1}


def test_factors_of_pixels_and_of_what_others_read_stay() -> None:
    def run(c: nn.Module, x: Tensor) -> Tensor:
        y = F.conv2d(x, c.w, None, padding=1).permute(0, 2, 3, 1)
        return (y - c.rows) * (y - c.v)

    graph, args = captured(
        run, random(1, 3, 4, 4), w=random(4, 3, 3, 3), rows=random(4, 1), v=random(4)
    )
    assert ops(check(fold_convolutions, graph, args)) == {"conv2d": 1, "sub": 2, "mul": 1}


def test_a_bias_before_a_padded_convolution_stays() -> None:
    graph, args = captured(
        lambda c, x: F.conv2d(x + c.t, c.w, None, padding=1),
        random(1, 3, 8, 8), w=random(4, 3, 3, 3), t=random(1, 3, 1, 1),
    )  # fmt: skip
    assert ops(check(fold_convolutions, graph, args)) == {"add": 1, "conv2d": 1}


@pytest.mark.parametrize("batch", [1, 2])
def test_patches_are_a_linear(batch: int, golden: Golden) -> None:
    graph, args = captured(
        lambda c, x: F.conv2d(x, c.w, c.b, 4).flatten(2).transpose(1, 2),
        random(batch, 3, 8, 12), w=random(6, 3, 4, 4), b=random(6),
    )  # fmt: skip
    golden(f"passes/patches_{batch}.txt", check(fold_convolutions, graph, args))


def test_patches_refuse_an_odd_image_and_planar_1x1() -> None:
    log = Log()
    graph, args = captured(lambda c, x: F.conv2d(x, c.w, None, 4), random(1, 3, 9, 8),
                           w=random(6, 3, 4, 4))  # fmt: skip
    assert ops(check(fold_convolutions, graph, args, log)) == {"conv2d": 1}
    assert "is no multiple of the patch (4, 4)" in reasons(log)
    graph, args = captured(lambda c, x: F.conv2d(x, c.w), random(1, 3, 9, 8), w=random(6, 3, 1, 1))
    assert ops(check(fold_convolutions, graph, args, log)) == {"conv2d": 1}
    assert "not stored channels last" in reasons(log)


@pytest.mark.parametrize("channels", [3, 8])
def test_patches_inside_a_network_stay_a_convolution(channels: int) -> None:
    """Gathered element by element, the patches of 8 x 8 x 32 took 73 us of SegFormer on an H100."""

    def run(c: nn.Module, x: Tensor) -> Tensor:
        return F.conv2d(x.relu(), c.w, stride=4)

    graph, args = captured(run, random(1, channels, 8, 12), w=random(16, channels, 4, 4))
    log = Log()
    result = check(fold_convolutions, graph, args, log)
    assert ("linear" in ops(result)) == (channels == 3)
    assert ("stored channels last, where" in reasons(log)) == (channels == 8)


# -- siblings ------------------------------------------------------------------------------------


def test_join_siblings(golden: Golden) -> None:
    def function(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, c.q, c.b), F.linear(x, c.k), F.linear(x, c.v, c.b)
        return (q @ k.mT) @ v

    graph, args = captured(
        function, random(1, 5, 8), **{n: random(8, 8, seed=ord(n)) for n in "qkv"}, b=random(8)
    )
    golden("passes/join_siblings.txt", check(join_siblings, graph, args))


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda c, x: F.linear(x, c.q).relu() @ F.linear(x, c.k).mT, "the epilogue relu"),
        (lambda c, x: F.linear(x, c.q[:7]).mT @ F.linear(x, c.k), "multiple of 8"),
    ],
)
def test_join_siblings_refuses(function: Callable[..., Tensor], reason: str) -> None:
    log = Log()
    graph, args = captured(function, random(1, 5, 8), q=random(8, 8), k=random(8, 8, seed=1))
    result = check(join_siblings, fold_constants(graph), args, log)
    assert ops(result)["linear"] == 2
    assert reason in reasons(log)


@pytest.mark.parametrize(
    ("columns", "left"),
    [
        ((12, 12, 12), 1),  # whose rows begin at multiples of 4, alone as well
        ((12, 8, 8), 2),
        ((12, 8, 20), 3),  # beside them the one of 8 would begin at multiples of 4
        ((7, 9), 1),
    ],
)
def test_siblings_begin_no_worse_than_alone(columns: tuple[int, ...], left: int) -> None:
    def function(c: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, getattr(c, f"w{at}")).mT @ x for at in range(len(columns)))

    weights = {f"w{at}": random(size, 8, seed=at) for at, size in enumerate(columns)}
    graph, args = captured(function, random(1, 5, 8), **weights)
    assert ops(check(join_siblings, fold_constants(graph), args))["linear"] == left


def test_siblings_whose_heads_are_normalised_are_joined() -> None:
    """Their pointwise readers lead to a reduction of each head, so no epilogue could have them."""

    def function(c: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 4)).transpose(1, 2) for w in (c.q, c.k, c.v))
        return F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)

    weights = {name: random(8, 8, seed=ord(name)) for name in "qkv"}
    graph, args = captured(function, random(1, 5, 8), **weights)
    assert ops(check(join_siblings, canonicalize(graph), args))["linear"] == 1


# -- slices --------------------------------------------------------------------------------------


def test_push_slices(golden: Golden) -> None:
    def function(c: nn.Module, x: Tensor) -> Tensor:
        h = x + F.gelu(F.linear(F.layer_norm(x, (8,)), c.w))
        a = F.scaled_dot_product_attention(h, x, x)
        return (a.softmax(-1) + h)[:, 0]

    graph, args = captured(function, random(1, 5, 8), w=random(8, 8))
    golden("passes/push_slices.txt", check(push_slices, graph, args))


@pytest.mark.parametrize(
    "function, op, rows",
    [
        (lambda c, x: (x.relu() @ x.mT)[:, 1:3], "relu", 2),
        (lambda c, x: x.sigmoid().transpose(0, 1).reshape(5, 8)[2:3], "sigmoid", 1),
        (lambda c, x: (x.sigmoid() + c.row)[:, 1:3], "sigmoid", 2),
        (lambda c, x: x.softmax(1)[:, 1:3], "softmax", 5),
        (lambda c, x: x.cumsum(1)[:, 1:3], "cumsum", 5),
        (lambda c, x: x.cumsum(2)[:, 1:3], "cumsum", 2),
        (lambda c, x: x.sigmoid()[:, :2] * x.sigmoid().sum(), "sigmoid", 5),
    ],
)
def test_how_far_slices_go(function: Callable[..., Tensor], op: str, rows: int) -> None:
    graph, args = captured(function, random(1, 5, 8), row=random(8))
    result = check(push_slices, canonicalize(graph), args)
    (node,) = (node for node in result.nodes if node.op == op)
    assert node.outputs[0].sizes[1] == rows


def test_push_slices_refuses() -> None:
    log = Log()
    graph, args = captured(lambda c, x: (y := x.exp())[:, :2].sum() + y.sum(), random(1, 5, 8))
    check(push_slices, graph, args, log)
    assert "is read as a whole by %sum" in reasons(log)


@pytest.mark.parametrize("kept, columns", [(150, 152), (144, 144), (100, 100)])
def test_slices_that_only_take_padding_off_stay(kept: int, columns: int) -> None:
    """Rows of 150 halves are no whole copies of 16 bytes, rows of 152 are."""
    log = Log()
    x = random(2, 152, dtype=torch.float16)
    graph, args = captured(lambda c, x: x.relu()[:, :kept], x)
    result = check(push_slices, graph, args, log)
    (node,) = (node for node in result.nodes if node.op == "relu")
    assert node.outputs[0].sizes[1] == columns
    assert ("are whole copies as they are" in reasons(log)) == (columns == 152)


# -- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lowered_constants_keep_their_meaning(dtype: torch.dtype) -> None:
    """An epsilon that the type cannot hold, and a mask that would be -inf in it."""
    low = torch.finfo(torch.float32).min
    graph, args = captured(
        lambda c, x: (x * x + c.eps).sqrt() + (x + c.mask).softmax(-1),
        random(2, 3, dtype=torch.float32), eps=torch.tensor([1e-12]), mask=torch.full((2, 3), low),
    )  # fmt: skip
    lowered = lower_precision(graph, dtype)
    assert [node.attrs["other"] for node in lowered.nodes if "other" in node.attrs] == [
        pytest.approx(1e-12)
    ]
    (y,) = interpret(lowered, args)
    assert y.dtype == torch.float32
    assert bool(y.isfinite().all())


def test_every_product_keeps_its_precision_through_the_pipeline() -> None:
    def model(c: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, c.stem, c.bias, stride=4).flatten(2).transpose(1, 2)
        z = F.layer_norm(y, (16,))
        q, k, v = (z @ w for w in (c.q, c.k, c.v))
        y = y + (torch.softmax(q @ k.transpose(1, 2) * 0.25, -1) @ v)
        image = y.transpose(1, 2).reshape(1, 16, 4, 4)
        image = F.conv2d(image, c.one) + F.conv2d(image, c.three, padding=1)
        return F.conv2d(image, c.depth, padding=1, groups=16)

    constants = {
        name: random(*shape, dtype=torch.float32)
        for name, shape in {
            "stem": (16, 3, 4, 4), "bias": (16,), "q": (16, 16), "k": (16, 16), "v": (16, 16),
            "one": (16, 16, 1, 1), "three": (16, 16, 3, 3), "depth": (16, 1, 3, 3),
        }.items()
    }  # fmt: skip
    graph, args = captured(model, random(1, 3, 16, 16, dtype=torch.float32), **constants)
    lowered = run_pipeline(lower_products(graph, "tf32"))
    plain = run_pipeline(graph)
    assert [node.op for node in lowered.nodes] == [node.op for node in plain.nodes]
    multiplied = [node for node in lowered.nodes if node.definition.multiplies]
    assert {"linear", "conv", "attention"} <= {node.op for node in multiplied}
    assert all(node.attrs["products"] == "tf32" for node in multiplied)
    assert "products" not in str(plain)
    (exact,), (right,) = interpret(lowered, args), interpret(plain, args)
    assert torch.equal(exact, right)  # rounding is the kernels' doing
    (rounded,) = interpret(lowered, args, rounded=True)
    assert 0 < (rounded - right).norm() < 3e-3 * right.norm()
