"""A process that prepares items: `python -m sylvan.media.worker MODEL_DIR`.

Orders arrive on stdin, answers go to stdout; each is its length (u64, little
endian) and msgpack. The first answer comes without an item, and says whether the worker is ready.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from sylvan.media.documents import PAGES, draw_pages
from sylvan.media.dual_encoder import DualEncoderImages
from sylvan.media.fixed_size import FixedSizeImages
from sylvan.media.frames import read_frame, write_frame
from sylvan.media.images import UnreadableError
from sylvan.media.messages import PreparedItem, PrepareItem
from sylvan.media.processor import Processor, ProcessorError
from sylvan.media.published import PublishedImages
from sylvan.transport.codec import MessageDecoder, MessageEncoder
from sylvan.utils.threads import lower_priority


def main() -> None:
    """Serve until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # libraries print
    model_dir = Path(sys.argv[1])
    lower_priority()  # leave the CPU to the server's steps
    encoder, decoder = MessageEncoder(limit=None), MessageDecoder[PrepareItem](PrepareItem)
    try:
        processor = (
            DualEncoderImages.of(model_dir)
            or PublishedImages.of(model_dir)
            or FixedSizeImages.of(model_dir)
            or Processor(model_dir)
        )
    except (ImportError, OSError, ValueError, KeyError, AttributeError, ProcessorError) as error:
        write_frame(sink, encoder.encode(PreparedItem(id=-1, error=f"{error}")))
        return
    write_frame(sink, encoder.encode(PreparedItem(id=-1)))
    _serve(processor, source, sink, encoder, decoder)


def _serve(
    processor: Processor | FixedSizeImages | DualEncoderImages | PublishedImages,
    source: BinaryIO,
    sink: BinaryIO,
    encoder: MessageEncoder,
    decoder: MessageDecoder[PrepareItem],
) -> None:
    while (frame := read_frame(source)) is not None:
        item = decoder.decode(frame)
        try:
            answer = draw_pages(item) if PAGES in item.options else processor.prepare(item)
        except UnreadableError as error:
            answer = PreparedItem(id=item.id, error=str(error))
        except MemoryError:
            answer = PreparedItem(id=item.id, error="preparing it takes more memory than is free")
        write_frame(sink, encoder.encode(answer))


if __name__ == "__main__":
    main()
