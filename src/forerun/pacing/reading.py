"""The decision when a draft model reads a text that it has not read yet: a rent-or-buy problem.

A drafter that searches the text before it runs its model can do without the model. Reading the text so far has a price,
which is paid once. Reading is due when rounds without the model have lost as much as this price. It is due earlier if
the model is expected to gain much more than the price in the rest of the text, and at once if the price is a small
share of this gain. So a head, and a draft model with a short prompt, read beside their target. A long prompt is never
read for an answer that ends before the reading has paid.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.types import Stop

SMALL = 0.25  # share of the expected gain: a price below it is paid at once
USUAL_ANSWER = 256  # the most tokens that an answer is expected to have, whatever a request allows
NEEDED = 0.5  # the search is assumed to find nothing in this share of the remaining rounds


@dataclass
class Reading:
    """The decision whether the draft model of one request should read its text. All fields but `is_read` are in tokens.

    is_read: whether the model has read the text. num_unread: the number of tokens of the text that the model has not
    read; None = not known yet. A prefix shared with an earlier text counts as read. gain: the expected gain of a round
    with the model, less the cost of the round. owed: the loss of all rounds without the model so far.
    """

    is_read: bool = False
    num_unread: int | None = None
    gain: float = 0.0
    owed: float = 0.0

    def is_due(self, price: float, num_rounds: float) -> bool:
        """Return whether the model should draft. Before it drafts, it must read the text.

        price: the cost of reading the text so far. num_rounds: how many more rounds are expected.
        """
        if self.is_read or price <= 0:
            return True
        promised = num_rounds * self.gain
        needed = NEEDED * promised
        if price <= SMALL * needed:
            return True
        return price <= promised and self.owed >= price * min(1.0, price / needed)

    def observe(self, stop: Stop, num_drafted: int, num_accepted: int) -> None:
        """Count a round of the request. stop: the rule that ended the round's chain."""
        self.num_unread = self.num_unread if stop.num_unread is None else stop.num_unread
        promised = 0.0 if stop.search is None else stop.search.gain
        if not stop.confidences and promised < self.gain:  # the model would have been asked, and might have been right
            gained = num_accepted - sum(stop.search.worth[:num_drafted] if stop.search is not None else ())
            self.owed = max(0.0, self.owed + self.gain - gained)
        if num_drafted:
            self.is_read |= bool(stop.confidences)
