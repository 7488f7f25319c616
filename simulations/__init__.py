"""ETTR against MTBF from measured costs."""
