"""From logits to the distribution that a token is drawn from, and the random numbers that draw it."""

from forerun.sampling.pipeline import (
    Filters as Filters,
    History as History,
    likeliest as likeliest,
    logprobs_of as logprobs_of,
    probs as probs,
    takes_the_best as takes_the_best,
)
