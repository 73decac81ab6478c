"""Hunyuan 3."""

from backend.formats.tagged.hunyuan import hunyuan

FORMAT = hunyuan("hunyuan_v3", ("hy_v3", "hy3", "hunyuan"), has_key_clue=True)
