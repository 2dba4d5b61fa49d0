"""What sets jobs apart."""

from computeshare.jobspec.documents.differences import differences, flattened


def test_nested_fields_are_told_by_dotted_names_and_lists_are_values() -> None:
    document = {"a": 1, "b": {"c": {"d": [1, 2]}, "e": None}, "f": {}}
    assert flattened(document) == {"a": 1, "b.c.d": [1, 2], "b.e": None, "f": {}}


def test_only_what_differs_is_told_with_each_ones_value() -> None:
    specs = [
        {"model": "mlp", "optimizer": {"name": "SGD", "lr": 0.1}, "codec": "auto"},
        {"model": "mlp", "optimizer": {"name": "SGD", "lr": 0.2, "momentum": 0.9}, "codec": {"up": "int8"}},
        {"model": "mlp", "optimizer": {"name": "SGD", "lr": 0.1}, "codec": "auto"},
    ]
    assert differences(specs) == {
        "optimizer.lr": [0.1, 0.2, 0.1],
        "codec": ["auto", None, "auto"],
        "optimizer.momentum": [None, 0.9, None],
        "codec.up": [None, "int8", None],
    }


def test_what_a_recipe_was_found_to_have_is_no_difference_of_its_own() -> None:
    specs = [{"recipe_args": {"width": width}, "recipe_facts": {"train": width}} for width in (1, 2)]
    assert differences(specs) == {"recipe_args.width": [1, 2]}


def test_the_same_specification_twice_has_no_differences() -> None:
    assert differences([{"a": {"b": 1}}, {"a": {"b": 1}}]) == {}
