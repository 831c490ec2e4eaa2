"""The task reasoning_gym: the generated problems of the package reasoning-gym, with its graders behind checks."""
