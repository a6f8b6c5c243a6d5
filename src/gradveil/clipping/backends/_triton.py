"""The kernels behind cuda.py, which says what holds for all of them. Read only where Triton is installed.

Names: B examples, T positions, L pixels; a ``piece`` is one program's share of a long row.
"""
# Triton's language has no types that a checker could follow.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _weigh(square, example, bound, present, norms, weights, lost, HAS_PRESENT: tl.constexpr):
    """min(1, bound / norm), 0 where not finite or not present; written for the host, and returned."""
    norm = tl.sqrt(square)
    limit = tl.load(bound)
    finite = square < float("inf")  # False for nan as well
    weight = tl.where(norm > limit, limit / norm, 1.0)
    weight = tl.where(finite, weight, 0.0)
    is_lost = tl.where(finite, 0, 1)
    if HAS_PRESENT:
        here = tl.load(present + example) != 0
        weight = tl.where(here, weight, 0.0)
        is_lost = tl.where(here, is_lost, 0)
    tl.store(norms + example, norm)
    tl.store(weights + example, weight)
    tl.store(lost + example, 1, mask=is_lost == 1)
    return weight


@triton.jit
def _row_square(rows, example, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    start = rows + example.to(tl.int64) * size
    for offset in range(0, size, BLOCK):
        v = tl.load(start + offset + at, mask=offset + at < size, other=0.0).to(tl.float32)
        total += v * v
    return tl.sum(total)


@triton.jit
def row_weights(
    first, second, size1, size2, bound, present, norms, weights, lost,
    TWO: tl.constexpr, HAS_PRESENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per example: the norm of its rows in one or two tensors, and its weight."""
    example = tl.program_id(0)
    square = _row_square(first, example, size1, BLOCK)
    if TWO:
        square += _row_square(second, example, size2, BLOCK)
    _weigh(square, example, bound, present, norms, weights, lost, HAS_PRESENT)


@triton.jit
def partial_weights(
    partials, rows, count, size, bound, present, norms, weights, lost,
    HAS_ROWS: tl.constexpr, HAS_PRESENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per example: its squared norm from partial sums (and its row of another tensor), and its weight."""
    example = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    parts = tl.load(partials + example.to(tl.int64) * count + at, mask=at < count, other=0.0)
    square = tl.sum(parts)
    if HAS_ROWS:
        square += _row_square(rows, example, size, BLOCK)
    _weigh(square, example, bound, present, norms, weights, lost, HAS_PRESENT)


@triton.jit
def _weighted_block(
    rows, weights, out, block, examples, size, channels, taps,
    ADD: tl.constexpr, TURN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    columns = block * BLOCK_P + tl.arange(0, BLOCK_P)
    at = tl.arange(0, BLOCK_B)
    total = tl.zeros([BLOCK_B, BLOCK_P], tl.float32)
    for start in range(0, examples, BLOCK_B):
        i = start + at
        w = tl.load(weights + i, mask=i < examples, other=0.0)
        inside = (i < examples)[:, None] & (columns < size)[None, :] & (w > 0.0)[:, None]
        v = tl.load(rows + i.to(tl.int64)[:, None] * size + columns[None, :], mask=inside, other=0.0)
        total += w[:, None] * v.to(tl.float32)
    found = tl.sum(total, axis=0)
    place = columns
    if TURN:  # from (outputs, taps, channels) to (outputs, channels, taps)
        inner = columns % (channels * taps)
        place = columns - inner + (inner % channels) * taps + inner // channels
    if ADD:
        found += tl.load(out + place, mask=columns < size, other=0.0)
    tl.store(out + place, found, mask=columns < size)


@triton.jit
def weighted_columns(
    first, second, weights, out1, out2, examples, size1, size2, blocks1, channels, taps,
    TWO: tl.constexpr, ADD: tl.constexpr, TURN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Sums over examples of weight times row. Rows of weight 0 are never loaded: their nan stays out."""
    block = tl.program_id(0)
    if TWO:
        if block < blocks1:
            _weighted_block(first, weights, out1, block, examples, size1, channels, taps, ADD, TURN, BLOCK_B, BLOCK_P)
        else:
            _weighted_block(
                second, weights, out2, block - blocks1, examples, size2, channels, taps, ADD, False, BLOCK_B, BLOCK_P
            )
    else:
        _weighted_block(first, weights, out1, block, examples, size1, channels, taps, ADD, TURN, BLOCK_B, BLOCK_P)


@triton.jit
def _scaled_copy(source, out, size, piece, pieces, weight, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """One of some pieces: out = weight * source, or (KEEP) source; where weight is 0, 0 and nothing is read."""
    at = tl.arange(0, BLOCK)
    readable = tl.where(weight > 0.0, size, 0)
    for offset in range(piece * BLOCK, size, pieces * BLOCK):
        v = tl.load(source + offset + at, mask=offset + at < readable, other=0.0).to(tl.float32)
        if not KEEP:
            v = v * weight
        tl.store(out + offset + at, v, mask=offset + at < size)


@triton.jit
def rank_one(
    x, g, x_out, g_out, inputs, outputs, bound, present, norms, weights, lost,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PRESENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per example of g x^T (and g, the bias): its norm, its weight, w g and x."""
    example = tl.program_id(0)
    g_square = _row_square(g, example, outputs, BLOCK)
    x_square = 0.0
    if HAS_WEIGHT:
        x_square += _row_square(x, example, inputs, BLOCK)
    if HAS_BIAS:
        x_square += 1.0
    weight = _weigh(x_square * g_square, example, bound, present, norms, weights, lost, HAS_PRESENT)
    row = example.to(tl.int64)
    _scaled_copy(g + row * outputs, g_out + row * outputs, outputs, 0, 1, weight, False, BLOCK)
    if HAS_WEIGHT:
        _scaled_copy(x + row * inputs, x_out + row * inputs, inputs, 0, 1, weight, True, BLOCK)


@triton.jit
def _positions(rows, start, positions, offset, size, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = start + tl.arange(0, BLOCK_T)
    d = offset + tl.arange(0, BLOCK_D)
    inside = (t < positions)[:, None] & (d < size)[None, :]
    return tl.load(rows + t[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def gram_partials(
    x, g, partials, lengths, positions, inputs, outputs, tiles,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per example and pair of position tiles (i <= j): its share of sum_st <x_s,x_t> <g_s,g_t>."""
    example, i, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if i > j:
        return
    x += example * positions * inputs
    g += example * positions * outputs
    xx = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    gg = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    if HAS_WEIGHT:
        for d in range(0, inputs, BLOCK_D):
            a = _positions(x, i * BLOCK_T, positions, d, inputs, BLOCK_T, BLOCK_D)
            b = _positions(x, j * BLOCK_T, positions, d, inputs, BLOCK_T, BLOCK_D)
            xx = tl.dot(a, tl.trans(b), xx, input_precision="tf32x3")
    for d in range(0, outputs, BLOCK_D):
        a = _positions(g, i * BLOCK_T, positions, d, outputs, BLOCK_T, BLOCK_D)
        b = _positions(g, j * BLOCK_T, positions, d, outputs, BLOCK_T, BLOCK_D)
        gg = tl.dot(a, tl.trans(b), gg, input_precision="tf32x3")
    if HAS_BIAS:
        xx += 1.0  # |sum_t g_t|^2 is the sum of all <g_s, g_t>; where t is padding, gg is 0
    at = tl.program_id(0) * tiles * tiles + i * tiles + j
    share = tl.sum(xx * gg)
    tl.store(partials + at, tl.where(i == j, share, 2.0 * share))
    if i == j:
        t = tl.arange(0, BLOCK_T)
        diagonal = tl.where(t[:, None] == t[None, :], tl.maximum(xx, 0.0) * tl.maximum(gg, 0.0), 0.0)
        length = tl.sum(tl.sqrt(diagonal))
        tl.store(lengths + tl.program_id(0) * tiles + i, length)


@triton.jit
def gram_scale(
    x, g, x_out, g_out, partials, lengths, x_size, g_size, tiles, margin, bound, present, norms, weights, lost,
    HAS_WEIGHT: tl.constexpr, HAS_PRESENT: tl.constexpr,
    TILES: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per example and piece: its norm from the shares, its weight, and pieces of w g and x."""
    example = tl.program_id(0)
    at = tl.arange(0, PAIRS)
    used = (at < tiles * tiles) & (at // tiles <= at % tiles)
    square = tl.sum(tl.load(partials + example * tiles * tiles + at, mask=used, other=0.0))
    t = tl.arange(0, TILES)
    length = tl.sum(tl.load(lengths + example * tiles + t, mask=t < tiles, other=0.0))
    # The sum of shares cancels; its rounding error is at most a few units in the last place of length^2.
    square = tl.where(square > 0.0, square, square * 0.0) + margin * length * length
    weight = _weigh(square, example, bound, present, norms, weights, lost, HAS_PRESENT)
    piece, pieces = tl.program_id(1), tl.num_programs(1)
    row = example.to(tl.int64)
    _scaled_copy(g + row * g_size, g_out + row * g_size, g_size, piece, pieces, weight, False, BLOCK)
    if HAS_WEIGHT:
        _scaled_copy(x + row * x_size, x_out + row * x_size, x_size, piece, pieces, weight, True, BLOCK)


@triton.jit
def padded_channels_last(
    x, out, channels, height, width, out_height, out_width, sb, sc, sh, sw, pad_h, pad_w,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program per example, padded row and block of it: (B, C, H, W) to (B, H', W', C) with zeros around."""
    example, h = tl.program_id(0) // out_height, tl.program_id(0) % out_height
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    y, z = h - pad_h, w - pad_w
    inside = (c < channels)[:, None] & ((z >= 0) & (z < width))[None, :] & ((y >= 0) & (y < height))
    row = x + example.to(tl.int64) * sb + y * sh
    v = tl.load(row + c[:, None] * sc + z[None, :] * sw, mask=inside, other=0.0).to(tl.float32)
    to = out + tl.program_id(0).to(tl.int64) * out_width * channels
    tl.store(to + w[None, :] * channels + c[:, None], v, mask=(c < channels)[:, None] & (w < out_width)[None, :])


@triton.jit
def conv_gradients(
    field, map_, grads, partials, channels, outputs, height, width, map_width, pixels, taps, kernel_width,
    stride_h, stride_w, dilation_h, dilation_w, tiles_o, tiles_n, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """One program per example, group and tile of the (outputs, taps x channels) gradient of its own loss.

    The field is padded and channels last, the map channels first: patches are read straight from the field, at an
    address that is the sum of one offset per pixel and one per column, along channels in whole vectors.
    """
    tiles = tiles_o * tiles_n
    example, tile, group = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    groups = tl.num_programs(1)
    tile_o, tile_n = tile // tiles_n, tile % tiles_n
    o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    size, stride = channels * taps, channels * groups
    tap, c = n // channels, n % channels
    places = ((tap // kernel_width) * dilation_h * width + (tap % kernel_width) * dilation_w) * stride + c
    field += example.to(tl.int64) * height * width * stride + group * channels
    map_ += (example * groups + group).to(tl.int64) * outputs * pixels
    total = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for start in range(0, pixels, BLOCK_L):
        p = start + tl.arange(0, BLOCK_L)
        seen = (o < outputs)[:, None] & (p < pixels)[None, :]
        value = tl.load(map_ + o[:, None] * pixels + p[None, :], mask=seen, other=0.0).to(tl.float32)
        # Beyond the last pixel the map is 0, and the last patch stands in: never anything of another example.
        q = tl.minimum(p, pixels - 1)
        pixel = ((q // map_width) * stride_h * width + (q % map_width) * stride_w) * stride
        patch = tl.load(field + pixel[:, None] + places[None, :], mask=(n < size)[None, :], other=0.0)
        total = tl.dot(value, patch, total, input_precision=PRECISION)
    at = (example * groups + group).to(tl.int64) * outputs * size + o[:, None] * size + n[None, :]
    tl.store(grads + at, total, mask=(o < outputs)[:, None] & (n < size)[None, :])
    tl.store(partials + (example * groups + group) * tiles + tile, tl.sum(total * total))


@triton.jit
def channel_moments(x, g, mean, rstd, scaled, shift, pixels, channels, per_group, BLOCK: tl.constexpr):
    """Group norm; one program per example and channel: sum g and (sum g x - mean sum g) rstd."""
    at, i = tl.arange(0, BLOCK), tl.program_id(0)
    start = i.to(tl.int64) * pixels
    sums, products = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    group = (i // channels) * (channels // per_group) + (i % channels) // per_group
    centre = tl.load(mean + group).to(tl.float32)
    for offset in range(0, pixels, BLOCK):
        inside = offset + at < pixels
        gv = tl.load(g + start + offset + at, mask=inside, other=0.0).to(tl.float32)
        xv = tl.load(x + start + offset + at, mask=inside, other=0.0).to(tl.float32)
        sums += gv
        products += gv * (xv - centre)
    tl.store(shift + i, tl.sum(sums))
    tl.store(scaled + i, tl.sum(products) * tl.load(rstd + group).to(tl.float32))


@triton.jit
def feature_moments(x, g, mean, rstd, scaled, shift, positions, features, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Layer norm; one program per example and block of features: sums over its positions."""
    example = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = example.to(tl.int64) * positions
    sums, products = tl.zeros([BLOCK_T, BLOCK_D], tl.float32), tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for offset in range(0, positions, BLOCK_T):
        t = offset + tl.arange(0, BLOCK_T)
        inside = (t < positions)[:, None] & (d < features)[None, :]
        at = (start + t)[:, None] * features + d[None, :]
        gv = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        xv = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        centre = tl.load(mean + start + t, mask=t < positions, other=0.0).to(tl.float32)
        scale = tl.load(rstd + start + t, mask=t < positions, other=0.0).to(tl.float32)
        sums += gv
        products += gv * (xv - centre[:, None]) * scale[:, None]
    tl.store(shift + example * features + d, tl.sum(sums, axis=0), mask=d < features)
    tl.store(scaled + example * features + d, tl.sum(products, axis=0), mask=d < features)


@triton.jit
def noise_on_gradients(table, noise, std, divide_by, rate, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """One program per block of some gradient: g becomes (g + std z) / divide_by, and with STEP p becomes p - rate g.

    A row of the table is a block: the address of its first element, its place in the noise, its length, the address of
    the first element of its parameter.
    """
    row = table + tl.program_id(0) * 4
    at = tl.arange(0, BLOCK)
    length = tl.load(row + 2)
    start = tl.load(row + 1)
    grad = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    z = tl.load(noise + start + at, mask=at < length, other=0.0)
    g = tl.load(grad, mask=at < length, other=0.0)
    g = (g + tl.load(std) * z) / divide_by
    tl.store(grad, g, mask=at < length)
    if STEP:
        parameter = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + at
        tl.store(parameter, tl.load(parameter, mask=at < length, other=0.0) - rate * g, mask=at < length)


@triton.jit
def sum_up(losses, present, flags, total, lost, size, BLOCK: tl.constexpr):
    """One program: the sum of the losses that are present; flags that are set are added to lost, and cleared."""
    at = tl.arange(0, BLOCK)
    sums, found = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int64)
    for offset in range(0, size, BLOCK):
        i = offset + at
        here = tl.load(present + i, mask=i < size, other=0) != 0
        sums += tl.where(here, tl.load(losses + i, mask=i < size, other=0.0).to(tl.float32), 0.0)
        found += tl.load(flags + i, mask=i < size, other=0).to(tl.int64)
        tl.store(flags + i, 0, mask=i < size)
    tl.store(total, tl.sum(sums))
    tl.store(lost, tl.load(lost) + tl.sum(found))
