"""Integrity: is the data what it should be, is the model still right, has anything been corrupted?

    data    schema, coverage, leakage, duplicates, overlap, drift, fraud      data.py
    model   calibration, slices, fairness, staleness, quantization, missing   model.py
    flips   what a flipped bit does, by region and bit position               flips.py
    score   every detector against faults planted in clean data               score.py
    cost    what the checksums of tables and products cost                    cost.py

``python -m dlrm.integrity --help`` lists the commands. Every check returns findings
(``findings.py``); a command prints them, writes JSON and HTML, and exits with 1 if one is bad.
"""
