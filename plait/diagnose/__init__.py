"""Whether a compiled program is right, where it first departs from eager, and which decision of the compiler made it so."""
