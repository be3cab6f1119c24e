"""Training runs texts side by side in one pass, in which a state would go on from one text into the next: refused."""

from __future__ import annotations

import importlib

import pytest
import torch

from forerun import BadOption
from forerun.train.heads import Teacher, own_blocks
from forerun.train.heads.backbone import Backbone, BackboneOptions
from support import VOCAB, random_hybrid


def test_what_keeps_states_is_not_trained_along() -> None:
    model = random_hybrid(1)
    teacher = Teacher.of(model, torch.ones(VOCAB), VOCAB)
    with pytest.raises(BadOption, match="a target that keeps states cannot be trained along"):
        Backbone(BackboneOptions(), teacher)
    vectors = importlib.import_module("forerun.train.heads.pass")
    with pytest.raises(BadOption, match="pass cannot be trained for a target that keeps states: train medusa"):
        vectors.layers(vectors.Options(), model.config)
    with pytest.raises(BadOption, match="whose blocks have parts that training does not know: train medusa"):
        own_blocks(model.config, 1)
