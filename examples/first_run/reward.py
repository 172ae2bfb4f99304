"""The reward of the first run: 1 for exactly the right answer, 0 for anything else.

A reward function is called once per sample, with the arguments that it names. Besides the two used here it may ask for
prompt, response_ids, data_source, extra_info and finish_reason.
"""


def score(response: str, ground_truth: str) -> float:
    """Whether the response is the right answer and nothing more; white space around it does not count."""
    return float(response.strip() == ground_truth)
