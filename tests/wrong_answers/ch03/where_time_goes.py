"""Answers to 3.8, `where_time_goes`: wrong in a plausible way, or right in another."""

from tests.wrong_answers import right, wrong


def _cut(spans, step):
    cut = ((max(begin, step[0]), min(end, step[1])) for begin, end in spans)
    return [(begin, end) for begin, end in cut if begin < end]


def _merged(spans):
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _total(spans):
    return sum(end - begin for begin, end in spans)


def _beside(computing, communicating):
    pairs = [(a, b) for a in computing for b in communicating]
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def _parts(step, computing, communicating):
    compute, hidden = _total(computing), _beside(computing, communicating)
    exposed = _total(communicating) - hidden
    idle = step[1] - step[0] - compute - exposed
    return {"compute": compute, "hidden": hidden, "exposed": exposed, "idle": idle}


@right("3.8")
def merges_and_intersects(step, computing, communicating):
    return _parts(step, _merged(_cut(computing, step)), _merged(_cut(communicating, step)))


@right("3.8")
def sweeps_over_events(step, computing, communicating):
    events = [(step[0], 0, 0), (step[1], 0, 0)]
    for kind, spans in enumerate((computing, communicating)):
        for begin, end in _cut(spans, step):
            events += [(begin, kind, 1), (end, kind, -1)]
    seconds, open_spans, before = {"compute": 0, "hidden": 0, "exposed": 0, "idle": 0}, [0, 0], None
    for time, kind, change in sorted(events):
        if before is not None:
            computes, communicates = map(bool, open_spans)
            seconds["compute"] += computes * (time - before)
            seconds["hidden"] += (computes and communicates) * (time - before)
            seconds["exposed"] += (communicates and not computes) * (time - before)
            seconds["idle"] += (not computes and not communicates) * (time - before)
        open_spans[kind] += change
        before = time
    return seconds


@wrong("3.8", names="counted-twice")
def adds_the_lengths_up(step, computing, communicating):
    return _parts(step, _cut(computing, step), _cut(communicating, step))


@wrong("3.8", names="counted-twice")
def merges_computing_only(step, computing, communicating):
    return _parts(step, _merged(_cut(computing, step)), _cut(communicating, step))


@wrong("3.8", names="counted-twice")
def hides_overlapping_calls_twice(step, computing, communicating):
    cut = [_cut(spans, step) for spans in (computing, communicating)]
    parts, hidden = _parts(step, *map(_merged, cut)), _beside(_merged(cut[0]), cut[1])
    return parts | {"hidden": hidden, "exposed": parts["hidden"] + parts["exposed"] - hidden}


@wrong("3.8", names="edges-left-out")
def takes_spans_inside_the_step_only(step, computing, communicating):
    lists = (computing, communicating)
    inside = [[s for s in spans if step[0] <= s[0] and s[1] <= step[1]] for spans in lists]
    return merges_and_intersects(step, *inside)


@wrong("3.8", names="compute-without-hidden")
def takes_the_four_for_parts_of_the_step(step, computing, communicating):
    parts = merges_and_intersects(step, computing, communicating)
    return parts | {"compute": parts["compute"] - parts["hidden"]}


@wrong("3.8", names="shares")
def divides_by_the_step(step, computing, communicating):
    parts = merges_and_intersects(step, computing, communicating)
    return {name: seconds / (step[1] - step[0]) for name, seconds in parts.items()}


@wrong("3.8", names="gaps-counted")
def takes_the_whole_stretch(step, computing, communicating):
    def stretch(spans):
        spans = _cut(spans, step)
        return [(min(span[0] for span in spans), max(span[1] for span in spans))] if spans else []

    return _parts(step, stretch(computing), stretch(communicating))


@wrong("3.8", names="beyond-the-step")
def does_not_cut(step, computing, communicating):
    return _parts(step, _merged(computing), _merged(communicating))


@wrong("3.8", names="all-exposed")
def exposes_all(step, computing, communicating):
    parts = merges_and_intersects(step, computing, communicating)
    return parts | {"exposed": parts["hidden"] + parts["exposed"]}


@wrong("3.8", names="all-hidden")
def hides_all(step, computing, communicating):
    parts = merges_and_intersects(step, computing, communicating)
    return parts | {"hidden": parts["hidden"] + parts["exposed"]}


@wrong("3.8", names="hidden-taken-twice")
def takes_communication_from_the_rest(step, computing, communicating):
    parts = merges_and_intersects(step, computing, communicating)
    return parts | {"idle": parts["idle"] - parts["hidden"]}


@wrong("3.8", names="exposed-is-idle")
def calls_all_else_idle(step, computing, communicating):
    parts = merges_and_intersects(step, computing, communicating)
    return parts | {"idle": parts["idle"] + parts["exposed"]}


@wrong("3.8", names="in-one-order")
def trusts_the_order(step, computing, communicating):
    def merged(spans):
        result = []
        for begin, end in _cut(spans, step):
            if result and result[-1][0] <= begin <= result[-1][1]:
                result[-1] = result[-1][0], max(end, result[-1][1])
            else:
                result.append((begin, end))
        return result

    return _parts(step, merged(computing), merged(communicating))


@wrong("3.8", names="no-spans")
def wants_a_first_span(step, computing, communicating):
    first = min(computing)[0], min(communicating)[0]
    return merges_and_intersects(
        (max(step[0], min(*first, step[0])), step[1]), computing, communicating
    )


@wrong("3.8", names="list-changed")
def sorts_in_place(step, computing, communicating):
    computing.sort(reverse=True)
    communicating.sort()
    return merges_and_intersects(step, computing, communicating)
