"""What reads several packed texts in one pass through a target refuses states, which would go on into the next text."""

import importlib
from dataclasses import replace

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


def test_a_head_of_one_layer_is_like_the_last_one_with_attention() -> None:
    config = random_hybrid(1).config
    assert own_blocks(config, 1).blocks == config.blocks[1:2]
    without = replace(config, blocks=config.blocks[:1])
    with pytest.raises(BadOption, match="whose blocks have parts that training does not know: train medusa"):
        own_blocks(without, 1)
