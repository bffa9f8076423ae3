"""Renders the pages of PDF documents as images, with PDFium."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from sylvan.media.images import UnreadableError
from sylvan.media.messages import PreparedItem, PrepareItem

PAGES = "pages"
"""Item option: the item is a PDF document; the largest number of pages to render."""

_SIDE = 1568  # pixels of a page's longer side
_POINTS = 72.0 * 200  # the longest side that PDF readers agree on
_LEAST = 1e-3


def draw_pages(item: PrepareItem) -> PreparedItem:
    """Return the pages of a document as PNG files: arrays of bytes, named by their number.

    Raises:
        UnreadableError: It is damaged, encrypted, or has too many pages; or PDFium is missing.
    """
    try:
        import pypdfium2
    except ImportError:
        raise UnreadableError("documents in PDF need sylvan[pdf]") from None
    most = int(item.options[PAGES])
    try:
        with pypdfium2.PdfDocument(item.data) as document:
            count = len(document)
            if not 0 < count <= most:
                raise UnreadableError(f"it has {count} pages, {most} may be sent (media.items)")
            pages = [_drawn(document[index], item.max_pixels) for index in range(count)]
    except pypdfium2.PdfiumError as error:
        raise UnreadableError(f"the document cannot be read ({error})") from error
    features = {str(number): np.frombuffer(page, np.uint8) for number, page in enumerate(pages)}
    return PreparedItem(id=item.id, features=features)


def _drawn(page: Any, max_pixels: int) -> bytes:
    width, height = (min(max(float(side), _LEAST), _POINTS) for side in page.get_size())
    scale = min(_SIDE / max(width, height), (max_pixels / (width * height)) ** 0.5)
    file = io.BytesIO()
    page.render(scale=scale).to_pil().convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()
