"""Qwen 2.5 VL, which sees images and videos. Only its text model is read, which is built like Qwen 2 VL's text model.

Its GGUF files name the architecture of Qwen 2 VL.
"""

from forerun.models.families.qwen2_vl import NAMES as NAMES, read as read, write as write
