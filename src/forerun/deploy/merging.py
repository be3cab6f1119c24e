"""The metrics of several replicas as one text in Prometheus' format, each sample with the label `replica`."""

from __future__ import annotations

from collections.abc import Mapping

_HEAD = "# HELP "


def merged(texts: Mapping[str, str]) -> str:
    """Join the metrics of several replicas into one text. Each metric occurs once, with the samples of all replicas.

    texts: maps each replica's name to its metrics. Every sample must already have a label, because the label `replica`
    is added before the first label.
    """
    heads, samples = dict[str, list[str]](), dict[str, list[str]]()
    for replica, text in texts.items():
        for family in text.split(_HEAD)[1:]:
            name, lines = family.split(None, 1)[0], family.splitlines()
            comments = [i for i, line in enumerate(lines) if i == 0 or line.startswith("#")]
            heads.setdefault(name, [_HEAD + lines[0], *(lines[i] for i in comments[1:])])
            labelled = (
                line.replace("{", f'{{replica="{replica}",', 1) for i, line in enumerate(lines) if i not in comments
            )
            samples.setdefault(name, []).extend(labelled)
    return "".join(line + "\n" for name in heads for line in (*heads[name], *samples[name]))
