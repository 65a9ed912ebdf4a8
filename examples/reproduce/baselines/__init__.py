"""Systems to compare with, as far as a prefill or a decode of one request goes."""
