"""What a run's record says about its speed: a model of the step time, and what was measured. No sockets, no clocks."""
