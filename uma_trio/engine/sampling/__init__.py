"""From logits to tokens: all rows of a step at once, in numpy."""
