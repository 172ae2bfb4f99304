"""Whole jobs on real parts, run by ``nightshift run`` as a user runs them, in arms that alternate.

Each bench appends what an arm measured to one JSON file, so that it may be broken off and go on: an arm that stands
there is not run again. ``--most 1`` runs one arm and prints the table as far as it is known.
"""
