"""One architecture per file, named as the checkpoint's `model_type`."""
