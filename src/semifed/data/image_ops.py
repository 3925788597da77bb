"""Image operations on batches of 8-bit images, each sample with its own parameter, equal to Pillow pixel for pixel.

Images are uint8 [n, c, h, w] with one or three channels; parameters are tensors [n]. Results are uint8 tensors of the
same shape. Operations come in kinds that share a kernel: tables of 256 entries (`look_up`), affine maps (`resample`),
blends with a degenerate image (`blend`); a caller can serve different operations of one kind in a single call.
"""

import torch
from torch import Tensor

# Pillow steps through an affine map in 16.16 fixed point when it takes the nearest pixel.
_FIXED_ONE = 65536


def luminance(images: Tensor) -> Tensor:
    """ITU-R 601 grey levels [n, h, w] as int32, in Pillow's integer arithmetic; one channel stays as it is."""
    if images.shape[1] == 1:
        return images[:, 0].int()
    red, green, blue = images.int().unbind(1)
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


def blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Go from `degenerate` (factor 0) to `images` (factor 1) and beyond; cut to whole levels, as Pillow does."""
    # Single precision with a separately rounded product: a fused multiply-add would change some levels by one.
    base = degenerate.float()
    return (images.float() - base).mul_(factor.float()).add_(base).clamp_(0, 255).to(torch.uint8)


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each level by its entry in the sample's uint8 table [n, c or 1, 256]."""
    count, channels = images.shape[:2]
    pixels = images.flatten(2).long()
    return tables.expand(count, channels, 256).gather(2, pixels).view(images.shape)


def identity_table(device: torch.device) -> Tensor:
    """The table [256] that changes nothing."""
    return torch.arange(256, dtype=torch.uint8, device=device)


def posterize_table(bits: Tensor) -> Tensor:
    """Tables [n, 256] that keep the highest `bits` bits (0 to 8)."""
    kept = 256 - torch.pow(2, 8 - bits.long())
    return (identity_table(bits.device).long() & kept[:, None]).to(torch.uint8)


def solarize_table(threshold: Tensor) -> Tensor:
    """Tables [n, 256] that invert every level at or above `threshold`."""
    level = identity_table(threshold.device).long()
    return torch.where(level < threshold[:, None], level, 255 - level).to(torch.uint8)


def brightness_table(factor: Tensor) -> Tensor:
    """Tables [n, 256] that blend with black."""
    factor = factor[:, None]
    return blend(torch.zeros_like(factor), identity_table(factor.device), factor)


def contrast_table(images: Tensor, factor: Tensor) -> Tensor:
    """Tables [n, 256] that blend with the image's own mean luminance, rounded to a whole level."""
    grey = luminance(images).flatten(1)
    size = grey.shape[1]
    mean = (2 * grey.sum(1) + size).div(2 * size, rounding_mode="floor")
    return blend(mean[:, None], identity_table(images.device), factor[:, None])


def autocontrast_table(images: Tensor) -> Tensor:
    """Tables [n, c, 256] that stretch each channel from its darkest and lightest level to 0 and 255."""
    pixels = images.flatten(2)
    low = pixels.amin(2, keepdim=True).double()
    high = pixels.amax(2, keepdim=True).double()
    level = identity_table(images.device)
    # Double precision and one rounding an operation, as in Pillow; `255 / tensor` multiplies by a rounded reciprocal.
    scale = torch.full_like(low, 255.0).div_(high - low)
    stretched = (level * scale).add_(-low * scale).clamp_(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, level)


def equalize_table(images: Tensor) -> Tensor:
    """Tables [n, c, 256] that flatten each channel's histogram, by Pillow's integer rule."""
    count, channels = images.shape[:2]
    pixels = images.flatten(2).long()
    first_bin = torch.arange(count * channels, device=images.device).view(count, channels, 1) * 256
    histogram = torch.bincount((pixels + first_bin).flatten(), minlength=count * channels * 256)
    histogram = histogram.view(count, channels, 256)
    lightest = histogram.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - lightest).div(255, rounding_mode="floor")
    darker = histogram.cumsum(2) - histogram
    half = step.div(2, rounding_mode="floor")
    flattened = (darker + half).div(step.clamp(min=1), rounding_mode="floor").clamp_(max=255).to(torch.uint8)
    return torch.where(step > 0, flattened, identity_table(images.device))


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits of every level."""
    return look_up(images, posterize_table(bits)[:, None])


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert every level at or above `threshold`."""
    return look_up(images, solarize_table(threshold)[:, None])


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: factor 0 is black, 1 changes nothing."""
    return look_up(images, brightness_table(factor)[:, None])


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean luminance: factor 0 is flat grey, 1 changes nothing."""
    return look_up(images, contrast_table(images, factor)[:, None])


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    return look_up(images, autocontrast_table(images))


def equalize(images: Tensor) -> Tensor:
    """Flatten each channel's histogram."""
    return look_up(images, equalize_table(images))


def color(images: Tensor, factor: Tensor) -> Tensor:
    """Blend three channels with their luminance: factor 0 is grey, 1 changes nothing."""
    return blend(luminance(images)[:, None], images, factor[:, None, None, None])


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed copy (centre 5/13, neighbours 1/13); the outermost pixels stay, as in Pillow."""
    sharpened = images.clone(memory_format=torch.contiguous_format)
    if min(images.shape[2:]) < 3:
        return sharpened
    level = images.float()
    centre = level[..., 1:-1, 1:-1]
    columns = (level[..., :-2, :] + level[..., 1:-1, :]).add_(level[..., 2:, :])
    box = (columns[..., :-2] + columns[..., 1:-1]).add_(columns[..., 2:])
    # Sums are whole and 13 is odd, so no quotient lies near a half and rounding is exact.
    smooth = box.add_(centre, alpha=4).add_(6.5).div_(13).floor_()
    sharpened[..., 1:-1, 1:-1] = blend(smooth, centre, factor[:, None, None, None])
    return sharpened


def shear_x_matrix(amount: Tensor) -> Tensor:
    """Affine maps [n, 6] that take a pixel from `amount` columns further right per row."""
    return _matrix(amount, a=1.0, b=amount, e=1.0)


def shear_y_matrix(amount: Tensor) -> Tensor:
    """Affine maps [n, 6] that take a pixel from `amount` rows further down per column."""
    return _matrix(amount, a=1.0, d=amount, e=1.0)


def translate_x_matrix(pixels: Tensor) -> Tensor:
    """Affine maps [n, 6] that take a pixel from `pixels` columns further right."""
    return _matrix(pixels, a=1.0, c=pixels, e=1.0)


def translate_y_matrix(pixels: Tensor) -> Tensor:
    """Affine maps [n, 6] that take a pixel from `pixels` rows further down."""
    return _matrix(pixels, a=1.0, e=1.0, f=pixels)


def rotate_matrix(degrees: Tensor, height: int, width: int) -> Tensor:
    """Affine maps [n, 6] that turn the image counter-clockwise about its centre."""
    angle = -torch.deg2rad(degrees.double())
    cos, sin = torch.cos(angle).round(decimals=15), torch.sin(angle).round(decimals=15)
    x, y = width / 2, height / 2
    return _matrix(degrees, a=cos, b=sin, c=x - cos * x - sin * y, d=-sin, e=cos, f=y + sin * x - cos * y)


def _matrix(
    like: Tensor,
    *,
    a: Tensor | float = 0.0,
    b: Tensor | float = 0.0,
    c: Tensor | float = 0.0,
    d: Tensor | float = 0.0,
    e: Tensor | float = 0.0,
    f: Tensor | float = 0.0,
) -> Tensor:
    """Rows (a, b, c, d, e, f): the source of (x, y) is (ax + by + c, dx + ey + f)."""
    matrix = torch.zeros(len(like), 6, dtype=torch.float64, device=like.device)
    for position, entry in enumerate((a, b, c, d, e, f)):
        matrix[:, position] = entry
    return matrix


def source_pixels(matrix: Tensor, height: int, width: int) -> Tensor:
    """For maps [n, 6], the pixel each target pixel is taken from [n, h * w]; h * w stands for black."""
    a, b, c, d, e, f = matrix.double().unbind(1)
    x = torch.arange(width, device=matrix.device)
    y = torch.arange(height, device=matrix.device)[:, None]
    # Pillow samples at pixel centres, rounds the map to fixed point once and then adds it up exactly.
    column = _fixed(a) * x + _fixed(b) * y + _fixed(c + 0.5 * a + 0.5 * b)
    row = _fixed(d) * x + _fixed(e) * y + _fixed(f + 0.5 * d + 0.5 * e)
    column, row = column >> 16, row >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return torch.where(inside, row * width + column, height * width).flatten(1)


def _fixed(coefficient: Tensor) -> Tensor:
    return (coefficient * _FIXED_ONE + 0.5).floor().long()[:, None, None]


def resample(images: Tensor, sources: Tensor) -> Tensor:
    """Take every target pixel from the pixel that `sources` [n, h * w] names, black where it names none."""
    count, channels, height, width = images.shape
    with_black = images.new_zeros(count, channels, height * width + 1)
    with_black[:, :, :-1] = images.flatten(2)
    return with_black.gather(2, sources[:, None].expand(count, channels, height * width)).view(images.shape)


def shear_x(images: Tensor, amount: Tensor) -> Tensor:
    """Shear along rows, nearest pixel, black fill; a positive `amount` moves lower rows left."""
    return _affine(images, shear_x_matrix(amount))


def shear_y(images: Tensor, amount: Tensor) -> Tensor:
    """Shear along columns, nearest pixel, black fill; a positive `amount` moves right columns up."""
    return _affine(images, shear_y_matrix(amount))


def translate_x(images: Tensor, pixels: Tensor) -> Tensor:
    """Move left by whole `pixels`, black fill."""
    return _affine(images, translate_x_matrix(pixels))


def translate_y(images: Tensor, pixels: Tensor) -> Tensor:
    """Move up by whole `pixels`, black fill."""
    return _affine(images, translate_y_matrix(pixels))


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Turn counter-clockwise about the centre, nearest pixel, black fill."""
    return _affine(images, rotate_matrix(degrees, images.shape[2], images.shape[3]))


def _affine(images: Tensor, matrix: Tensor) -> Tensor:
    return resample(images, source_pixels(matrix, images.shape[2], images.shape[3]))


def flip_columns(mask: Tensor, width: int) -> Tensor:
    """Source column of every target column [n, w]: mirrored where `mask`."""
    column = torch.arange(width, device=mask.device)
    return torch.where(mask[:, None], width - 1 - column, column)


def reflected_span(offset: Tensor, padding: int, side: int) -> Tensor:
    """Source row or column [n, side] of a window at `offset` (0 to 2 * padding) into a side padded by reflection."""
    position = torch.arange(side, device=offset.device) + (offset[:, None] - padding)
    return (side - 1) - ((side - 1) - position.abs()).abs()


def take_window(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pick the source rows [n, h] and columns [n, w] of every sample."""
    count, channels, height, width = images.shape
    sources = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    picked = images.flatten(2).gather(2, sources[:, None].expand(count, channels, height * width))
    return picked.view(images.shape)


def flip(images: Tensor, mask: Tensor) -> Tensor:
    """Mirror left and right where `mask`."""
    count, _, height, width = images.shape
    rows = torch.arange(height, device=images.device).expand(count, height)
    return take_window(images, rows, flip_columns(mask, width))


def crop(images: Tensor, top: Tensor, left: Tensor, padding: int) -> Tensor:
    """Pad by reflection, then cut a window of the old size at (`top`, `left`), each from 0 to 2 * padding."""
    height, width = images.shape[2:]
    if padding >= min(height, width):
        raise ValueError(f"reflect padding {padding} must be smaller than the sides, which are {height}x{width}")
    return take_window(images, reflected_span(top, padding, height), reflected_span(left, padding, width))


def cutout(images: Tensor, cx: Tensor, cy: Tensor, size: int, fill: int) -> Tensor:
    """Fill a box around (`cx`, `cy`) with the level `fill`.

    The geometry is that of FixMatch's code: the box starts at floor(max(0, centre - size / 2)) and both ends are
    painted, so it is up to size + 1 wide; at the left and top edge it is moved inside, at the right and bottom cut off.
    """
    height, width = images.shape[2:]
    hole = _span(cy, size, height)[:, :, None] & _span(cx, size, width)[:, None, :]
    # On bytes two products and a sum are an order of magnitude faster than a broadcast masked_fill.
    painted = hole.to(torch.uint8)[:, None]
    return images * (1 - painted) + painted * fill


def _span(centre: Tensor, size: int, side: int) -> Tensor:
    start = (centre - size / 2).clamp(min=0).long()[:, None]
    position = torch.arange(side, device=centre.device)
    return (position >= start) & (position <= start + size)
