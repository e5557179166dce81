"""The one list of known faults, by level."""

from __future__ import annotations

from plait.diagnose.faults import graphs, samples, scripts, tiles
from plait.diagnose.faults.known import KnownFault

_CAPTURE = (
    KnownFault(
        "use lost in the gradient",
        "The gradient of a value that is used twice is that of one use.",
        samples.TWO_USES,
        "joint",
        graphs.one_use_lost,
    ),
)

_IMPORT = (
    KnownFault(
        "wrong epsilon",
        "A norm adds another epsilon than the program says.",
        samples.NORM,
        "import",
        graphs.nodes(graphs.other_constant(lambda v: 5e-6 < v < 2e-5, lambda v: 10 * v)),
    ),
    KnownFault(
        "epsilon outside the root",
        "A norm divides by sqrt(v) + eps in place of sqrt(v + eps).",
        samples.NORM,
        "import",
        graphs.nodes(graphs.epsilon_outside),
    ),
    KnownFault(
        "mean over one too few",
        "A mean is divided by another count than it has terms.",
        samples.NORM,
        "import",
        graphs.nodes(graphs.other_constant(lambda v: v == 40, lambda v: v - 1)),
    ),
    KnownFault(
        "finite mask value",
        "Masked scores become a large negative number, which other scores can be below.",
        samples.CAUSAL,
        "import",
        graphs.nodes(graphs.other_constant(lambda v: v == -float("inf"), lambda v: -1e4)),
    ),
    KnownFault(
        "comparison turned, NaN lost",
        "a < b is compiled as not a >= b, which takes the other side for NaN.",
        samples.WHERE,
        "import",
        graphs.nodes(graphs.compared_the_other_way),
    ),
    KnownFault(
        "integer division to zero",
        "An integer division rounds to zero where the program rounds down.",
        samples.DIVIDED,
        "import",
        graphs.nodes(graphs.rounded_to_zero),
    ),
    KnownFault(
        "negative index not wrapped",
        "A negative index is cut off at 0 and does not count from the end.",
        samples.ROWS,
        "import",
        graphs.nodes(graphs.not_wrapped),
    ),
    KnownFault(
        "last of equals",
        "argmax gives the last of several equal largest elements, eager the first.",
        samples.ARGMAX,
        "import",
        graphs.nodes(graphs.last_of_equals),
    ),
    KnownFault(
        "transposed strides",
        "A result has eager's values and shape in another order of memory.",
        samples.TRANSPOSED,
        "import",
        graphs.dense_results,
    ),
    KnownFault(
        "dtype widened",
        "A result is left in the type that it was computed in.",
        samples.NARROW,
        "import",
        graphs.not_narrowed,
    ),
    KnownFault(
        "stale alias",
        "A view of an argument that is overwritten still shows what was there before.",
        samples.VIEW,
        "import",
        graphs.nodes(graphs.before_the_update),
    ),
    KnownFault(
        "dropout not scaled",
        "What dropout keeps is not divided by how much it keeps.",
        samples.DROPOUT,
        "import",
        graphs.nodes(graphs.other_constant(lambda v: v == 2, lambda v: 1.0)),
    ),
    KnownFault(
        "noise of another size",
        "Random numbers are scaled by another factor than the program says.",
        samples.NOISY,
        "import",
        graphs.nodes(graphs.other_constant(lambda v: v == 0.25, lambda v: 2 * v)),
    ),
    KnownFault(
        "other seed in the backward",
        "The backward draws another mask than the forward did.",
        samples.DROPOUT,
        "import",
        graphs.nodes(graphs.other_draw, backward=True),
    ),
    KnownFault(
        "row term of softmax added",
        "In the gradient of softmax the sum over the row has the wrong sign.",
        samples.SOFTMAX_GRADIENT,
        "import",
        graphs.nodes(graphs.row_term_added, backward=True),
    ),
    KnownFault(
        "broadcast gradient not summed",
        "The gradient of an operand that was repeated for every row is that of the first row.",
        samples.AFFINE_GRADIENT,
        "import",
        graphs.nodes(graphs.first_row_alone, backward=True),
    ),
)

_REWRITE = (
    KnownFault(
        "dropped mask",
        "A rewrite loses the mask of attention.",
        samples.CAUSAL,
        "rewrite",
        graphs.nodes(graphs.mask_dropped, after="split_cascades"),
    ),
    KnownFault(
        "maximum not subtracted",
        "Softmax takes exp(x), which overflows, in place of exp(x - max x).",
        samples.SOFTMAX,
        "rewrite",
        graphs.nodes(graphs.maximum_not_subtracted, after="split_cascades"),
    ),
    KnownFault(
        "part of a split sum lost",
        "A sum that is split over blocks is put together without its last part.",
        samples.LONG_SUM,
        "rewrite",
        graphs.nodes(graphs.last_part_lost, after="split_reductions"),
    ),
)

_TILES = (
    KnownFault(
        "mask off by one",
        "A causal mask lets every row see one key more.",
        samples.CAUSAL,
        "tile",
        tiles.in_tiles(tiles.statements(tiles.one_key_more)),
    ),
    KnownFault(
        "maximum begins at 0",
        "A maximum has the identity of a sum.",
        samples.ROW_MAXIMUM,
        "tile",
        tiles.in_tiles(tiles.statements(tiles.zero_for_max)),
    ),
    KnownFault(
        "sum held in bf16",
        "The accumulator of a float32 sum is a bf16.",
        samples.ROW_SUM,
        "tile",
        tiles.in_tiles(tiles.narrow_sum),
    ),
)

_CODE = (
    KnownFault(
        "tail of a tile not masked",
        "Lanes behind the end of a row are added up too.",
        samples.SOFTMAX,
        "code",
        tiles.in_code(tiles.statements(tiles.tail_counted)),
    ),
    KnownFault(
        "remainder not stored",
        "Only whole tiles of a result are stored; the rest is what was in memory before.",
        samples.SCALED,
        "code",
        tiles.in_code(tiles.statements(tiles.remainder_not_stored)),
    ),
    KnownFault(
        "NaN dropped by a maximum",
        "A maximum passes over NaN, as the machine's own instruction does.",
        samples.ROW_MAXIMUM,
        "code",
        tiles.in_code(tiles.statements(tiles.without_nan)),
    ),
    KnownFault(
        "denormals flushed",
        "Numbers below the smallest normal one are read as 0.",
        samples.SCALED,
        "code",
        tiles.in_code(tiles.statements(tiles.flushed)),
    ),
    KnownFault(
        "running sum not rescaled",
        "Softmax over blocks of keys keeps what it added up under a maximum that has moved since.",
        samples.ATTENTION,
        "code",
        tiles.in_code(tiles.statements(tiles.not_rescaled)),
    ),
    KnownFault(
        "race between two blocks",
        "Two blocks write their partial results to one place, and one is lost.",
        samples.LONG_SUM,
        "code",
        tiles.in_code(tiles.statements(tiles.one_place_for_two)),
    ),
)

_CALL = (
    KnownFault(
        "read before it is written",
        "A kernel runs before the one whose result it reads.",
        samples.LONG_SUM,
        "script",
        scripts.script(scripts.read_too_early),
    ),
    KnownFault(
        "result is the argument",
        "A copy of an argument is the argument itself.",
        samples.COPIED,
        "script",
        scripts.script(scripts.argument_returned),
    ),
    KnownFault(
        "two results are one",
        "Two results of the same values share memory that eager keeps apart.",
        samples.TWICE,
        "script",
        scripts.script(scripts.one_memory),
    ),
    KnownFault(
        "buffer not written back",
        "A module's buffer is not updated.",
        samples.BUFFER,
        "script",
        scripts.script(scripts.not_written_back),
    ),
    KnownFault(
        "updates in the wrong order",
        "Two updates in place of one tensor change places.",
        samples.TWO_UPDATES,
        "script",
        scripts.script(scripts.updates_swapped),
    ),
    KnownFault(
        "saved statistic overwritten",
        "The backward reads a saved statistic after the forward has overwritten it.",
        samples.KEPT,
        "script",
        scripts.script(scripts.new_contents_saved, "forward"),
    ),
)

KNOWN: tuple[KnownFault, ...] = (*_CAPTURE, *_IMPORT, *_REWRITE, *_TILES, *_CODE, *_CALL)
"""Every known fault, in the order of the levels."""
