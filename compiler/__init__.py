"""A torch.compile backend for recommendation models that one can read.

It never imports ``dlrm``: everything here works on any model.
"""
