"""A reward that random weights can be measured with: spread over [0, 1), and the same for the same ids."""


def score(response_ids):
    return sum(int(token) for token in response_ids) % 1009 / 1009
