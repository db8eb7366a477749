"""Token ids that stand for an image, a video or a sound in a multimodal model's prompt: only text is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of config.json, read in SGLang 0.5.17 to 0.5.23. The ids of a picture's start and end are ordinary tokens, and not here.
_KEYS = (
    "media_placeholder_token_id",  # Kimi-K2.5, Kimi-VL: 163605
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id", "audio_token_index", "im_patch_id"),
)


def image_tokens(config: Mapping[str, Any]) -> set[int]:
    """Return the ids in whose place the model puts the states of an image; empty for a model of text.

    `config`: the whole config.json, not its text_config. Without the image the row is that of a plain token, which no serving
    engine ever feeds a drafter.
    """
    return {config[key] for key in _KEYS if isinstance(config.get(key), int)}
