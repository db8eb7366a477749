"""A drafter's way from the trainer to the server: which boundaries its config asks for, conversion, acceptance, training.

`config`: what a drafter's config.json says and which boundaries an engine would feed it. `convert`: a trained drafter as SGLang
loads it. `accept`: the accept length that serving will show, from a dump. `train`: short trainings by the real trainer.
"""
