"""The known faults: miscompilations that `plait verify` must catch, each with the smallest program that shows it."""
