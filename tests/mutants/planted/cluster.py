"""Bugs in what makes a Slurm out of machines."""

from __future__ import annotations

from tests.mutants.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "health_check_takes_the_word_of_others_away",
        "cluster/render.py",
        "in *DOWN* | *DRAIN*) exit 1 ;; esac ;;",
        "in *NEVER*) exit 1 ;; esac ;;",
        "P3: `Kill task failed` stands until a person has looked",
        ("cluster",),
    ),
    Mutant(
        "health_check_resumes_beside_what_did_not_die",
        "cluster/render.py",
        '    left=$(unkilled) || wrong "nobody could look at what runs here"\n',
        "    left=\n",
        "P3: a node is not resumed unseen",
        ("cluster",),
    ),
    Mutant(
        "health_check_looks_at_first_threads_alone",
        "cluster/render.py",
        "-path '/proc/*/*' ! -path '/proc/*/task*' -prune",
        "-path '/proc/*/task' -prune",
        "P3: a process whose first thread has ended may have another that does not die",
        ("cluster",),
    ),
    Mutant(
        "health_check_resumes_when_it_could_not_look",
        "cluster/render.py",
        "print job; exit failed || !seen }}",
        "print job }}",
        "P3: a node is not resumed unseen",
        ("cluster",),
    ),
)
