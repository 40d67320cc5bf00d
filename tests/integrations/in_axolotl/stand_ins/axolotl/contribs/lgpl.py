"""axolotl's package of another licence, of which `fix_untrained_tokens` asks for one function."""


def fix_untrained_tokens(*_, **__):
    raise AssertionError("no model of these tests has tokens that were never trained")
