"""Prepares videos for Qwen models: evenly spaced frames, in patches of two frames.

The video processors of transformers need torchvision, which the server needs for nothing else.
The rules are those of Qwen's own code (qwen-vl-utils), used to train the models.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sylvan.media.container import VideoFacts, video_facts, video_frames
from sylvan.media.images import UnreadableError
from sylvan.media.messages import PrepareItem

FPS, MAX_FRAMES = "fps", "max_frames"
"""Video options: frames sampled per second, and at most."""

_QWEN = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "Qwen2_5OmniProcessor")
_LONGEST_SIDE = 200  # largest aspect ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRules:
    """How many frames are sampled, and at which size.

    Attributes:
        whole: The pixel limits apply to the whole video instead of each frame.
        least: Smallest number of pixels.
        most: Largest number of pixels.
        max_tokens: Largest number of tokens of a video (of a frame, if `whole`).
        fps: Frames sampled per second.
        min_frames: Fewest sampled frames, if available.
        max_frames: Most sampled frames.
        patch: Side of a patch in pixels.
        merge: Patches per side that become one embedding.
        depth: Frames of a patch.
        tokens_per_second: Time positions per second; 0: they count patches.
    """

    whole: bool
    least: int
    most: int
    max_tokens: int
    fps: float
    min_frames: int
    max_frames: int
    patch: int
    merge: int
    depth: int
    tokens_per_second: float

    @property
    def factor(self) -> int:
        """Sides of frames are multiples of this."""
        return self.patch * self.merge

    def chosen(self, facts: VideoFacts, item: PrepareItem) -> list[int]:
        """Return the indices of the sampled frames, an even number if possible."""
        fps = float(item.options.get(FPS) or self.fps)
        most = min(self.max_frames, item.max_frames, item.options.get(MAX_FRAMES) or 1 << 30)
        count = min(max(int(facts.count / facts.fps * fps), self.min_frames), most, facts.count)
        count = max(1, count // self.depth * self.depth or count)
        return np.linspace(0, facts.count - 1, count).round().astype(int).tolist()

    def size(self, facts: VideoFacts, count: int) -> tuple[int, int]:
        """Return height and width of frames.

        Raises:
            UnreadableError: One side is too long.
        """
        height, width, factor = facts.height, facts.width, self.factor
        if max(height, width) > _LONGEST_SIDE * min(height, width):
            raise UnreadableError(f"one side is more than {_LONGEST_SIDE} times the other")
        tokens = self.max_tokens * factor * factor
        if self.whole:
            share = max(min(tokens, self.most // count), int(self.least * 1.05))
            most, times = share * count, max(self.depth, round(count / self.depth) * self.depth)
            if (scale := max(factor / height, factor / width)) > 1:
                height, width = int(height * scale), int(width * scale)
        else:
            share = int(tokens * 0.9) * self.depth // count
            most, times, count = max(min(self.most, share), int(self.least * 1.05)), 1, 1
        tall, wide = (round(side / factor) * factor for side in (height, width))
        if times * tall * wide > most:
            scale = math.sqrt(count * height * width / most)
            return self._cut(height / scale), self._cut(width / scale)
        if times * tall * wide < self.least:
            scale = math.sqrt(self.least / (count * height * width))
            return (
                math.ceil(height * scale / factor) * factor,
                math.ceil(width * scale / factor) * factor,
            )
        return tall, wide

    def _cut(self, side: float) -> int:
        return max(self.factor, math.floor(side / self.factor) * self.factor)


def video_rules(model_dir: Path, processor: str, images: Any) -> VideoRules | None:
    """Return the rules of a checkpoint's files, or of its processor class; None: no videos."""
    if processor not in _QWEN:
        return None
    said = _read(model_dir / "video_preprocessor_config.json")
    vision = _vision(_read(model_dir / "config.json"))
    whole = processor == "Qwen3VLProcessor"
    patch = int(said.get("patch_size") or images.patch_size)
    side = 32 if whole else 28
    size = said.get("size") or {}
    tokens = 25.0 if processor == "Qwen2_5OmniProcessor" else 4.0
    return VideoRules(
        whole=whole,
        least=said.get("min_pixels") or size.get("shortest_edge") or 128 * side * side,
        most=said.get("max_pixels") or size.get("longest_edge") or 768 * side * side,
        max_tokens=said.get("max_video_tokens") or (768 if whole else 128_000),
        fps=said.get("fps") or 2.0,
        min_frames=said.get("min_frames") or 4,
        max_frames=said.get("max_frames") or 768,
        patch=patch,
        merge=int(said.get("merge_size") or images.merge_size),
        depth=int(said.get("temporal_patch_size") or images.temporal_patch_size),
        tokens_per_second=0.0
        if processor in ("Qwen2VLProcessor", "Qwen3VLProcessor")
        else float(vision.get("tokens_per_second") or tokens),
    )


def prepare_video(
    item: PrepareItem, rules: VideoRules, images: Any, processor: Any
) -> tuple[dict[str, np.ndarray], str, tuple[int, int, int], float]:
    """Return a video's features, its text in a prompt, its grid, and its time step.

    Args:
        item: The video, and its options.
        rules: Rules of the model.
        images: Image processor.
        processor: Processor of all media; writes the placeholder text.

    Raises:
        UnreadableError: The video is invalid.
    """
    facts = video_facts(item.data, item.max_pixels, item.max_seconds)
    chosen = rules.chosen(facts, item)
    tall, wide = rules.size(facts, len(chosen))
    frames = [
        frame.resize((wide, tall), resample=3)  # bicubic
        for frame in video_frames(item.data, chosen, item.max_pixels)
    ]
    patches, grid = patches_of(frames, rules, images)
    features = {"pixel_values_videos": patches, "video_grid_thw": np.array([grid], np.int64)}
    text = _text(processor, features, chosen, facts, rules)
    time, height, width = grid
    seconds = rules.depth * facts.seconds / len(chosen)
    step = rules.tokens_per_second * seconds if rules.tokens_per_second else 1.0
    return features, text, (time, height // rules.merge, width // rules.merge), step


def patches_of(
    frames: Sequence[Any], rules: VideoRules, images: Any
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return patches through `depth` frames, (N, C depth patch patch), and the counts per axis."""
    depth = rules.depth
    frames = [*frames, *[frames[-1]] * (-len(frames) % depth)]
    wide, tall = frames[0].size
    height, width, times = tall // rules.patch, wide // rules.patch, len(frames) // depth
    made = images(frames, do_resize=False, return_tensors="np")["pixel_values"]
    # An image is a video of one frame, which its patches repeat `depth` times.
    made = np.asarray(made, np.float32).reshape(
        times, depth, height * width, -1, images.temporal_patch_size, rules.patch, rules.patch
    )[:, :, :, :, 0]
    made = made.transpose(0, 2, 3, 1, 4, 5).reshape(times * height * width, -1)
    return np.ascontiguousarray(made), (times, height, width)


def _text(
    processor: Any,
    features: Mapping[str, np.ndarray],
    chosen: Sequence[int],
    facts: VideoFacts,
    rules: VideoRules,
) -> str:
    processor.video_processor = SimpleNamespace(
        merge_size=rules.merge, temporal_patch_size=rules.depth
    )
    shown = SimpleNamespace(fps=facts.fps, frames_indices=list(chosen))
    write = processor.replace_video_token
    more: dict[str, Any] = {}
    if "kwargs" in inspect.signature(write).parameters:
        more["load_audio_from_video"] = False
    return write({**features, "video_metadata": [shown]}, 0, **more)


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    config = config.get("thinker_config") or config
    return config.get("vision_config") or {}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
