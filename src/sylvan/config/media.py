"""Settings of images, videos and sounds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sylvan.config.section import Section
from sylvan.config.values import Bytes, Count, Secret


class MediaConfig(Section, frozen=True):
    """Images, videos and sounds in requests, for models that take them."""

    workers: Count = 1
    """Processes that decode and prepare media. They start with the first request that needs one."""
    vector_bytes: Bytes = 256 << 20
    """Encoder outputs kept after their requests, for later requests with the same item."""
    encoder_backend: Literal["auto", "torch", "none"] = "auto"
    """Backend of the transformer blocks of encoders: `auto` takes native kernels on a CPU for
    the blocks that they can compute, `torch` leaves all of them to PyTorch. With `none` no encoder
    is loaded: the model serves texts, and items that `media.encoder_urls` encode."""
    encoder_only: bool = False
    """Serve nothing but the encoder, for servers whose `media.encoder_urls` name this one."""
    encoder_urls: tuple[str, ...] = ()
    """Servers that prepare and encode items for this one, which loads no encoder. The same item
    goes to the same server; if that one does not answer, to the next."""
    encoder_key: Secret | None = None
    """Key of those servers."""
    fetch: bool = False
    """Fetch items from `http://` and `https://` addresses. Addresses of this machine and of private
    networks are refused unless `media.allowed_hosts` names them."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts from which items may be fetched; default: any public one."""
    allowed_dirs: tuple[str, ...] = ()
    """Directories from which items may be read by path (`file://`); default: none."""
    item_bytes: Bytes = 64 << 20
    """Largest encoded item; larger ones are refused with status 413."""
    pixels: Count = 64 << 20
    """Most pixels (width times height) of an image."""
    frames: Count = 768
    """Most frames used of a video; the model's processor may use fewer."""
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """Longest video or sound."""
    items: Count = 64
    """Most images, videos and sounds of one request."""
    fetch_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Timeout for fetching an item, in seconds."""
    process_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Timeout for decoding and preparing an item, in seconds; its process is then replaced."""
