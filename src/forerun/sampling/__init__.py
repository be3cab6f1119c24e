"""From logits to the distribution that a token is drawn from, and the random numbers that draw it."""

from forerun.sampling.pipeline import (
    Filters as Filters,
    History as History,
    filters_of as filters_of,
    likeliest as likeliest,
    logprobs_of as logprobs_of,
    only_filters as only_filters,
    probs as probs,
    takes_the_best as takes_the_best,
)
