"""What a convolution's kernel computes of each element of its image as it copies the image.

    %n[n, h, w, c] = scale_shift(%x[n, h, w, c], %scale[n, 1, 1, c], %shift[n, 1, 1, c])
    %r = relu(%n)   %y = conv(%r, %w)

A normalised image, one scaled by the gates of squeeze-and-excitation: pointwise nodes whose other
operands are numbers of each channel, some of which are known only after all of the image is. So no
kernel ahead can compute them. Where a block copies pixels through registers, it does so on their
way, and nobody stores the result; zeros of the border stay zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from gtco.ir.graph import Graph, Node
from gtco.ir.spec import FLOATS, Dim, TensorSpec
from gtco.ir.views import in_order, through_views
from gtco.passes.joined import joined_by


@dataclass(frozen=True)
class Prologue:
    """What stands ahead of an image, or of one piece of a concat of images.

    Args:
        nodes: in topological order; the last makes what the convolution or the concat reads.
        image: the value, no view, that they are computed of, element by element.
        piece: which of the concat's inputs it is; 0 where there is no concat.
    """

    nodes: tuple[Node, ...]
    image: str
    piece: int = 0


def prologue_of(graph: Graph, conv: Node) -> Prologue | None:
    """What stands ahead of the image of `conv`, or of the one piece of it that has any.

    Nobody outside reads what the nodes make, whatever else `graph` computes.
    """
    if not conv.definition.convolves:
        return None
    concat = joined_by(graph, conv)
    if concat is None:
        return _ahead(graph, conv.inputs[0], conv, 0)
    if len(graph.users[concat.values[0]]) > 1 or concat.values[0] in graph.outputs:
        return None
    found = [_ahead(graph, name, concat, at) for at, name in enumerate(concat.inputs)]
    several = [each for each in found if each is not None]
    return several[0] if len(several) == 1 else None


def _ahead(graph: Graph, value: str, reader: Node, piece: int) -> Prologue | None:
    """The nodes that make `value`, which `reader` alone reads."""
    last, views = through_views(graph.producers.get, value)
    producer, spec = graph.producers.get(last), graph.specs[value]
    if producer is None or graph.specs[last].shape != spec.shape or not _has_known_sizes(spec):
        return None
    sizes = spec.sizes
    if not in_order(views, sizes):
        return None
    chain: dict[str, Node] = {}
    waiting = [producer]
    while waiting:  # a node is taken once all of its readers are
        node = waiting.pop()
        inside = {reader.name} if not chain else chain.keys()
        if node.name in chain or not is_element_by_element(graph, node, sizes):
            continue
        if not _readers(graph, node.values[0]) <= inside:
            continue
        chain[node.name] = node
        made_by = (graph.producers.get(_base(graph, name)) for name in node.inputs)
        waiting += [each for each in made_by if each is not None and each.name not in chain]
    if not chain:
        return None
    nodes = tuple(node for node in graph.nodes if node.name in chain)
    images = {
        _base(graph, name)
        for node in nodes
        for name in node.inputs
        if graph.specs[name].sizes == sizes and _maker(graph, name) not in chain
    }
    late = any(
        graph.specs[name].sizes != sizes and _base(graph, name) not in graph.constants
        for node in nodes
        for name in node.inputs
    )
    return Prologue(nodes, images.pop(), piece) if late and len(images) == 1 else None


def is_element_by_element(graph: Graph, node: Node, sizes: tuple[int, ...]) -> bool:
    """Whether each element of `node` is made of the same of other images and of numbers that all
    pixels of an image share."""
    definition = node.definition
    specs = (*node.outputs, *(graph.specs[name] for name in node.inputs))
    if not all(map(_has_known_sizes, specs)):
        return False
    if not definition.is_pointwise or definition.gathers or definition.of_pairs:
        return False
    if definition.cuda is None or node.outputs[0].sizes != sizes:
        return False
    return all(_fits(graph, name, sizes) for name in node.inputs)


def _has_known_sizes(spec: TensorSpec) -> bool:
    return not any(isinstance(dim, Dim) for dim in spec.shape)


def _fits(graph: Graph, name: str, sizes: tuple[int, ...]) -> bool:
    spec = graph.specs[name]
    if spec.sizes == sizes:
        base, views = through_views(graph.producers.get, name)
        whole = graph.specs[base]
        return whole.numel == spec.numel and in_order(views, whole.sizes)
    *outer, channels = (1,) * (len(sizes) - spec.rank) + spec.sizes
    shared = channels in (1, sizes[-1]) and outer[0] in (1, sizes[0])
    return spec.dtype in FLOATS and shared and all(size == 1 for size in outer[1:])


def _base(graph: Graph, name: str) -> str:
    return through_views(graph.producers.get, name)[0]


def _maker(graph: Graph, name: str) -> str | None:
    node = graph.producers.get(_base(graph, name))
    return None if node is None else node.name


def _readers(graph: Graph, value: str) -> set[str]:
    """Names of the nodes that read `value`, through views or not, and "" for the caller."""
    found: set[str] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value in graph.outputs:
            found.add("")
        for user in graph.users[value]:
            if user.definition.is_view:
                waiting += user.values
            else:
                found.add(user.name)
    return found
