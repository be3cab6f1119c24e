"""Qwen 2.5 VL, which sees images and videos: only the text model is read; it is built like Qwen 2 VL's text model.

GGUF files of Qwen 2.5 VL name the architecture of Qwen 2 VL.
"""

from forerun.models.families.qwen2_vl import NAMES as NAMES, read as read, write as write
