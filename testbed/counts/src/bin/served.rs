//! The measured program, for callgrind. See [`counts::served`].

fn main() -> std::process::ExitCode {
    counts::served::main(|| 0)
}
