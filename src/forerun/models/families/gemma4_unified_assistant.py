"""The assistants of Gemma 4 12B (google/gemma-4-12B-it-assistant), built like the other Gemma 4 assistants."""

from forerun.models.families.gemma4_assistant import NAMES as NAMES, RUN_BY as RUN_BY, read as read, write as write
